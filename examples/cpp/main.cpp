// run_exported [--torch libtorch_cpu.so] [--calls N] FOLDER [FILE SIZES]...
//
// Runs an exported model on raw row-major files, `tokens.bin 2,12` say, and writes what the last call returns to
// result0.bin, result1.bin, ...
#include <dcompile/runner.h>

#include <cstdio>
#include <fstream>

static std::vector<char> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw dcompile::Error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

static std::vector<int64_t> read_sizes(const std::string& text) {
  std::vector<int64_t> sizes;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) sizes.push_back(std::stoll(part));
  return sizes;
}

static void write_file(const std::string& path, const dcompile::Tensor& result) {
  const dcompile::Tensor rows = dcompile::detail::laid_out(result, dcompile::row_major(result.shape));
  std::ofstream file(path, std::ios::binary);
  file.write(rows.as<char>(), rows.numel() * dcompile::itemsize(rows.dtype));
  std::printf("%s: %s", path.c_str(), rows.dtype.c_str());
  for (int64_t size : rows.shape) std::printf(" %lld", static_cast<long long>(size));
  std::printf("\n");
}

int main(int count, char** words) {
  try {
    std::vector<std::string> given(words + 1, words + count);
    dcompile::Options options;
    int calls = 1;
    while (given.size() > 1 && (given[0] == "--torch" || given[0] == "--calls")) {
      if (given[0] == "--torch") options.torch_library = given[1];
      else calls = std::stoi(given[1]);
      given.erase(given.begin(), given.begin() + 2);
    }
    if (given.empty() || given.size() % 2 == 0) throw dcompile::Error("usage: run_exported FOLDER [FILE SIZES]...");
    dcompile::Model model(given[0], options);

    std::vector<std::vector<char>> files;
    std::vector<dcompile::Tensor> arguments;
    for (size_t n = 1; n + 1 < given.size(); n += 2) {
      if (arguments.size() == model.arguments().size()) throw dcompile::Error("more files than the model has arguments");
      files.push_back(read_file(given[n]));
      arguments.push_back(
          dcompile::view(files.back().data(), read_sizes(given[n + 1]), model.arguments()[arguments.size()].dtype));
      const dcompile::Tensor& last = arguments.back();
      if (int64_t(files.back().size()) != last.numel() * dcompile::itemsize(last.dtype))
        throw dcompile::Error(given[n] + " has another size than " + given[n + 1] + " of " + last.dtype);
    }
    std::vector<dcompile::Tensor> results;
    for (int n = 0; n < calls; n++) results = model(arguments);
    for (size_t n = 0; n < results.size(); n++) write_file("result" + std::to_string(n) + ".bin", results[n]);
    return 0;
  } catch (const dcompile::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
