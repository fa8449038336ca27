// Runs what `dcompile.export` has written to a folder, in C++17 on Linux, without Python. One header, nothing to link.
//
//   dcompile::Model model("exported");
//   std::vector<int64_t> tokens(2 * 12);
//   std::vector<dcompile::Tensor> results = model({dcompile::view(tokens.data(), {2, 12})});
//   const float* logits = results[0].as<float>();
//
// Arguments are the model's tensors in the order of `torch.utils._pytree`; results likewise. The caller's memory is
// read, never kept. Whatever is wrong raises dcompile::Error: a damaged file, another format, another kind of machine,
// an argument that does not fit. Programs that call operators of ATen's need libtorch_cpu.so of the version of torch
// that they were exported with: it is found among what the process has loaded, under Options::torch_library, or where
// the system looks for libraries. Only torch's stable C interface is used. A model runs one call at a time.
#pragma once

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace dcompile {

constexpr int64_t kFormat = 2;  // of the files, as `dcompile.load` has it

struct Error : std::runtime_error {
  explicit Error(const std::string& text) : std::runtime_error("dcompile: " + text) {}
};

// A strided look at memory; shape and strides in elements. `owner`, if there is one, keeps the memory.
struct Tensor {
  void* data = nullptr;
  std::string dtype;  // as torch names it: float32, bfloat16, int64, bool
  std::vector<int64_t> shape, strides;
  std::shared_ptr<void> owner;

  template <class T> T* as() const { return static_cast<T*>(data); }
  int64_t numel() const {
    int64_t count = 1;
    for (int64_t size : shape) count *= size;
    return count;
  }
};

// What an argument has to be. A size is fixed where `low` is `high`; sizes of one name are equal.
struct Argument {
  struct Size { std::string name; int64_t low, high; };
  std::string dtype;
  std::vector<Size> shape;
  std::vector<int64_t> strides;
  bool any_strides;
};

struct Options {
  std::string torch_library;  // path of libtorch_cpu.so
};

inline int64_t itemsize(const std::string& dtype) {
  static const std::map<std::string, int64_t> known = {
      {"bool", 1}, {"uint8", 1}, {"int8", 1}, {"float8_e4m3fn", 1}, {"float8_e5m2", 1}, {"float8_e4m3fnuz", 1},
      {"float8_e5m2fnuz", 1}, {"float8_e8m0fnu", 1}, {"int16", 2}, {"uint16", 2}, {"float16", 2}, {"bfloat16", 2},
      {"int32", 4}, {"uint32", 4}, {"float32", 4}, {"complex32", 4}, {"int64", 8}, {"uint64", 8}, {"float64", 8},
      {"complex64", 8}, {"complex128", 16}};
  const auto found = known.find(dtype);
  if (found == known.end()) throw Error("dtype " + dtype + " is not known");
  return found->second;
}

inline std::vector<int64_t> row_major(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t n = shape.size(); n-- > 1;) strides[n - 1] = strides[n] * std::max<int64_t>(shape[n], 1);
  return strides;
}

// The caller's memory in row-major order. What has no type in C++, bfloat16 say, is given by name.
inline Tensor view(void* data, std::vector<int64_t> shape, std::string dtype) {
  std::vector<int64_t> strides = row_major(shape);
  return Tensor{data, std::move(dtype), std::move(shape), std::move(strides), nullptr};
}
inline Tensor view(float* data, std::vector<int64_t> shape) { return view(data, std::move(shape), "float32"); }
inline Tensor view(double* data, std::vector<int64_t> shape) { return view(data, std::move(shape), "float64"); }
inline Tensor view(int64_t* data, std::vector<int64_t> shape) { return view(data, std::move(shape), "int64"); }
inline Tensor view(int32_t* data, std::vector<int64_t> shape) { return view(data, std::move(shape), "int32"); }
inline Tensor view(uint8_t* data, std::vector<int64_t> shape) { return view(data, std::move(shape), "uint8"); }
inline Tensor view(bool* data, std::vector<int64_t> shape) { return view(data, std::move(shape), "bool"); }

namespace detail {

// --- files ----------------------------------------------------------------------------------------------------------

class Sha256 {
 public:
  static std::string of(const void* data, size_t size) {
    Sha256 digest;
    const auto* bytes = static_cast<const unsigned char*>(data);
    const size_t whole = size / 64 * 64;
    for (size_t at = 0; at < whole; at += 64) digest.block(bytes + at);
    unsigned char last[128] = {};
    const size_t rest = size - whole, length = rest < 56 ? 64 : 128;
    if (rest) std::memcpy(last, bytes + whole, rest);
    last[rest] = 0x80;
    for (int n = 0; n < 8; n++) last[length - 1 - n] = static_cast<unsigned char>(uint64_t(size) * 8 >> (8 * n));
    for (size_t at = 0; at < length; at += 64) digest.block(last + at);
    std::string text;
    for (uint32_t word : digest.state_)
      for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[word >> shift & 15];
    return text;
  }

 private:
  static uint32_t turn(uint32_t x, int by) { return x >> by | x << (32 - by); }

  void block(const unsigned char* data) {
    static const uint32_t k[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    uint32_t w[64];
    for (int n = 0; n < 16; n++)
      w[n] = uint32_t(data[4 * n]) << 24 | uint32_t(data[4 * n + 1]) << 16 | uint32_t(data[4 * n + 2]) << 8 |
             data[4 * n + 3];
    for (int n = 16; n < 64; n++) {
      const uint32_t a = turn(w[n - 15], 7) ^ turn(w[n - 15], 18) ^ w[n - 15] >> 3;
      const uint32_t b = turn(w[n - 2], 17) ^ turn(w[n - 2], 19) ^ w[n - 2] >> 10;
      w[n] = w[n - 16] + a + w[n - 7] + b;
    }
    uint32_t s[8];
    std::copy(state_, state_ + 8, s);
    for (int n = 0; n < 64; n++) {
      const uint32_t a = turn(s[4], 6) ^ turn(s[4], 11) ^ turn(s[4], 25), choice = (s[4] & s[5]) ^ (~s[4] & s[6]);
      const uint32_t b = turn(s[0], 2) ^ turn(s[0], 13) ^ turn(s[0], 22);
      const uint32_t first = s[7] + a + choice + k[n] + w[n];
      const uint32_t second = b + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      std::copy_backward(s, s + 7, s + 8);
      s[4] += first;
      s[0] = first + second;
    }
    for (int n = 0; n < 8; n++) state_[n] += s[n];
  }

  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
};

// A file in memory, whose pages are read when they are first touched. What is written to them stays in this process.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) throw Error(path + " is missing; export the model again");
    struct stat status;
    const bool known = fstat(file, &status) == 0 && S_ISREG(status.st_mode);
    size_ = known ? size_t(status.st_size) : 0;
    if (size_) data_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    close(file);
    if (!known || data_ == MAP_FAILED) throw Error(path + " cannot be read");
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile() {
    if (size_) munmap(data_, size_);
  }
  char* data() const { return static_cast<char*>(data_); }
  size_t size() const { return size_; }
  std::string text() const { return std::string(data(), size_); }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

class Json {
 public:
  enum Kind { kNull, kBool, kNumber, kString, kList, kObject };

  static Json parse(const std::string& text) {
    const char* at = text.c_str();
    Json found = value(at, at + text.size(), 0);
    if (at != text.c_str() + text.size()) throw Error("text behind the end of JSON");
    return found;
  }
  bool is(Kind kind) const { return kind_ == kind; }
  bool has(const std::string& key) const { return object_.count(key) != 0; }
  const Json& operator[](const std::string& key) const {
    const auto found = object_.find(key);
    if (found == object_.end()) throw Error("no field " + key);
    return found->second;
  }
  const Json& operator[](size_t place) const {
    if (place >= list_.size()) throw Error("a list is too short");
    return list_[place];
  }
  const std::vector<Json>& list() const { return wanted(kList).list_; }
  const std::map<std::string, Json>& object() const { return wanted(kObject).object_; }
  const std::string& string() const { return wanted(kString).text_; }
  int64_t integer() const { return std::strtoll(wanted(kNumber).text_.c_str(), nullptr, 10); }
  bool boolean() const { return wanted(kBool).text_ == "true"; }
  std::vector<int64_t> integers() const {
    std::vector<int64_t> found;
    for (const Json& item : list()) found.push_back(item.integer());
    return found;
  }
  const std::string& written() const { return text_; }

 private:
  const Json& wanted(Kind kind) const {
    if (kind_ != kind) throw Error("a field is of another type");
    return *this;
  }
  static void blank(const char*& at) {
    while (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t') at++;
  }
  static void take(const char*& at, char sign) {
    if (*at != sign) throw Error(std::string("no ") + sign + " in JSON");
    at++;
  }
  static Json value(const char*& at, const char* end, int depth) {
    if (depth > 64) throw Error("JSON is nested too deeply");
    Json made;
    blank(at);
    if (*at == '{') {
      made.kind_ = kObject;
      for (blank(++at); *at != '}';) {
        blank(at);
        std::string key = quoted(at, end);
        blank(at);
        take(at, ':');
        made.object_[key] = value(at, end, depth + 1);
        if (*at != '}') take(at, ',');
      }
      at++;
    } else if (*at == '[') {
      made.kind_ = kList;
      for (blank(++at); *at != ']';) {
        made.list_.push_back(value(at, end, depth + 1));
        if (*at != ']') take(at, ',');
      }
      at++;
    } else if (*at == '"') {
      made.kind_ = kString;
      made.text_ = quoted(at, end);
    } else {
      static const std::string signs = "+-.abcdefghijklmnopqrstuvwxyzEIN0123456789";
      while (at < end && signs.find(*at) != std::string::npos) made.text_ += *at++;
      if (made.text_.empty()) throw Error("no value in JSON");
      made.kind_ = made.text_ == "null" ? kNull : made.text_ == "true" || made.text_ == "false" ? kBool : kNumber;
    }
    blank(at);
    return made;
  }
  static std::string quoted(const char*& at, const char* end) {
    std::string text;
    for (take(at, '"'); at < end && *at != '"'; at++) {
      if (*at != '\\') {
        text += *at;
        continue;
      }
      static const std::map<char, char> signs = {{'n', '\n'}, {'t', '\t'}, {'r', '\r'}, {'b', '\b'}, {'f', '\f'}};
      if (*++at == 'u') {
        if (end - at < 5) throw Error("JSON ends within a string");
        const long code = std::strtol(std::string(at + 1, 4).c_str(), nullptr, 16);
        if (code < 0x80) text += char(code);
        else if (code < 0x800) (text += char(0xc0 | code >> 6)) += char(0x80 | (code & 63));
        else ((text += char(0xe0 | code >> 12)) += char(0x80 | (code >> 6 & 63))) += char(0x80 | (code & 63));
        at += 4;
      } else {
        const auto found = signs.find(*at);
        text += found == signs.end() ? *at : found->second;
      }
    }
    take(at, '"');
    return text;
  }

  Kind kind_ = kNull;
  std::string text_;
  std::vector<Json> list_;
  std::map<std::string, Json> object_;
};

// --- sizes ----------------------------------------------------------------------------------------------------------

// A number, or a sum over size symbols in reverse Polish notation.
class Size {
 public:
  Size(const Json& said, const std::map<std::string, size_t>& symbols) {
    if (said.is(Json::kNumber)) {
      constant_ = said.integer();
      return;
    }
    std::istringstream words(said.string());
    static const std::set<std::string> signs = {"+", "*", "//", "%", "max", "min"};
    for (std::string word; words >> word;) {
      const auto symbol = symbols.find(word);
      if (symbol != symbols.end()) tokens_.push_back({'s', int64_t(symbol->second)});
      else if (signs.count(word)) tokens_.push_back({word == "max" ? '>' : word == "min" ? '<' : word[0], 0});
      else tokens_.push_back({'n', std::strtoll(word.c_str(), nullptr, 10)});
    }
  }

  int64_t operator()(const std::vector<int64_t>& symbols) const {
    if (tokens_.empty()) return constant_;
    std::vector<int64_t> stack;
    for (const auto& [sign, number] : tokens_) {
      if (sign == 's' || sign == 'n') {
        stack.push_back(sign == 'n' ? number : symbols.at(size_t(number)));
        continue;
      }
      if (stack.size() < 2) throw Error("a size cannot be worked out");
      const int64_t b = stack.back(), rest = stack[stack.size() - 2];
      stack.pop_back();
      stack.back() = sign == '+' ? rest + b : sign == '*' ? rest * b : sign == '>' ? std::max(rest, b)
          : sign == '<' ? std::min(rest, b) : sign == '/' ? floor_div(rest, b) : rest - floor_div(rest, b) * b;
    }
    return stack.back();
  }

 private:
  static int64_t floor_div(int64_t a, int64_t b) {
    if (b == 0) throw Error("a size is divided by zero");
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
  }
  int64_t constant_ = 0;
  std::vector<std::pair<char, int64_t>> tokens_;
};

using Sizes = std::vector<Size>;

inline std::vector<int64_t> values(const Sizes& sizes, const std::vector<int64_t>& symbols) {
  std::vector<int64_t> found;
  for (const Size& size : sizes) found.push_back(size(symbols));
  return found;
}

inline int64_t extent(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
  int64_t last = 1;
  for (size_t n = 0; n < shape.size(); n++) {
    if (!shape[n]) return 0;
    last += (shape[n] - 1) * strides[n];
  }
  return last;
}

// Whether elements lie the same way; strides of single elements do not matter.
inline bool lies_so(const Tensor& tensor, const std::vector<int64_t>& strides) {
  if (!tensor.numel()) return true;
  for (size_t n = 0; n < strides.size(); n++)
    if (tensor.shape[n] != 1 && tensor.strides[n] != strides[n]) return false;
  return true;
}

inline std::shared_ptr<void> memory(int64_t bytes) {
  void* found = std::aligned_alloc(64, (size_t(bytes) + 64) & ~size_t(63));
  if (!found) throw Error("no memory for " + std::to_string(bytes) + " bytes");
  return std::shared_ptr<void>(found, std::free);
}

inline void copy(char* to, const std::vector<int64_t>& strides, const Tensor& from) {
  const int64_t bytes = itemsize(from.dtype), count = from.numel();
  const int64_t rank = int64_t(from.shape.size());
  for (int64_t n = 0; n < count; n++) {
    int64_t rest = n, there = 0, here = 0;
    for (int64_t dim = rank; dim-- > 0; rest /= from.shape[size_t(dim)]) {
      const int64_t i = rest % from.shape[size_t(dim)];
      there += i * strides[size_t(dim)];
      here += i * from.strides[size_t(dim)];
    }
    std::memcpy(to + there * bytes, from.as<char>() + here * bytes, size_t(bytes));
  }
}

// A copy in memory of its own, in which elements lie by these strides.
inline Tensor laid_out(const Tensor& from, const std::vector<int64_t>& strides) {
  std::shared_ptr<void> owner = memory(extent(from.shape, strides) * itemsize(from.dtype));
  copy(static_cast<char*>(owner.get()), strides, from);
  void* const data = owner.get();
  return Tensor{data, from.dtype, from.shape, strides, std::move(owner)};
}

inline std::string shown(const std::vector<int64_t>& sizes) {
  std::string text;
  for (int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

// --- libraries ------------------------------------------------------------------------------------------------------

class Library {
 public:
  explicit Library(const std::string& path) : handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)), path_(path) {
    if (!handle_) throw Error(std::string("cannot load compiled kernels: ") + dlerror());
  }
  void* find(const std::string& name) const {
    void* const found = dlsym(handle_, name.c_str());
    if (!found) throw Error(path_ + " has no " + name + "; export the model again");
    return found;
  }

 private:
  void* handle_;  // never closed: OpenMP's threads may stand in its code
  std::string path_;
};

// Operators of ATen's, by torch's stable C interface.
class Torch {
 public:
  using Handle = void*;

  Torch(const std::string& path, const std::string& needed_for, const std::string& version) {
    const bool linked = path.empty() && dlsym(RTLD_DEFAULT, "torch_call_dispatcher");
    if (!linked) library_ = dlopen(path.empty() ? "libtorch_cpu.so" : path.c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (!linked && !library_) {
      const char* const why = dlerror();
      throw Error("the program calls " + needed_for + ", and libtorch is not here" +
                  (why ? std::string(" (") + why + ")" : "") + "; give the path of libtorch_cpu.so");
    }
    abi_ = function<uint64_t (*)()>("aoti_torch_abi_version")();
    const std::string found = std::to_string(abi_ >> 56) + "." + std::to_string(abi_ >> 48 & 255);
    if (found != version)
      throw Error("exported for torch " + version + ", this libtorch is " + found + "; export the model again");
    call_ = function<decltype(call_)>("torch_call_dispatcher");
    from_blob_ = function<decltype(from_blob_)>("torch_from_blob");
    gradients_ = function<decltype(gradients_)>("aoti_torch_grad_mode_set_enabled");
    recording_ = function<decltype(recording_)>("aoti_torch_grad_mode_is_enabled");
    what_ = optional<decltype(what_)>("torch_exception_get_what_without_backtrace");
    new_value_ = optional<decltype(new_value_)>("torch_new_stable_ivalue");
    device_ = function<int32_t (*)()>("aoti_torch_device_type_cpu")();
    strided_ = function<int32_t (*)()>("aoti_torch_layout_strided")();
  }

  // Switches autograd off in this thread.
  struct NoGradients {
    explicit NoGradients(const Torch& torch) : torch_(torch), before_(torch.recording_()) { torch.gradients_(false); }
    ~NoGradients() { torch_.gradients_(before_); }
    const Torch& torch_;
    bool before_;
  };

  // A tensor over memory that `owner` keeps, if there is one.
  Handle wrap(const Tensor& tensor) const {
    Handle made = nullptr;
    auto* const held = tensor.owner ? new std::shared_ptr<void>(tensor.owner) : nullptr;
    void (*const drop)(void*, void*) = [](void*, void* kept) { delete static_cast<std::shared_ptr<void>*>(kept); };
    check(from_blob_(tensor.data, int64_t(tensor.shape.size()), tensor.shape.data(), tensor.strides.data(), 0,
                     number("aoti_torch_dtype_" + tensor.dtype), device_, -1, &made, strided_, nullptr, 0,
                     held ? drop : nullptr, held), "from_blob");
    return made;
  }

  // The tensor behind a handle, which it takes over.
  Tensor unwrap(Handle handle, const std::string& dtype) const {
    static const auto free_ = function<int32_t (*)(Handle)>("aoti_torch_delete_tensor_object");
    Tensor found;
    found.owner = std::shared_ptr<void>(handle, [](void* kept) { free_(kept); });
    int64_t rank = 0, *sizes = nullptr, *strides = nullptr;
    int32_t type = 0;
    check(function<int32_t (*)(Handle, int64_t*)>("aoti_torch_get_dim")(handle, &rank), "get_dim");
    check(function<int32_t (*)(Handle, int64_t**)>("aoti_torch_get_sizes")(handle, &sizes), "get_sizes");
    check(function<int32_t (*)(Handle, int64_t**)>("aoti_torch_get_strides")(handle, &strides), "get_strides");
    check(function<int32_t (*)(Handle, int32_t*)>("aoti_torch_get_dtype")(handle, &type), "get_dtype");
    check(function<int32_t (*)(Handle, void**)>("aoti_torch_get_data_ptr")(handle, &found.data), "get_data_ptr");
    found.shape.assign(sizes, sizes + rank);
    found.strides.assign(strides, strides + rank);
    found.dtype = type == number("aoti_torch_dtype_" + dtype) ? dtype : "another dtype";
    return found;
  }

  void drop(Handle handle) const { function<int32_t (*)(Handle)>("aoti_torch_delete_tensor_object")(handle); }

  void call(const std::string& name, const std::string& overload, std::vector<uint64_t>& stack) const {
    const int32_t failed = call_(name.c_str(), overload.c_str(), stack.data(), abi_);
    check(failed, name + "." + (overload.empty() ? "default" : overload));
  }

  // out = beta * added + alpha * left @ right
  void product(const std::string& name, const std::vector<Handle>& t, double beta, double alpha) const {
    const auto run = function<int32_t (*)(Handle, Handle, Handle, Handle, double, double)>(name);
    const int32_t failed = run(t[0], t[1], t[2], t[3], beta, alpha);
    for (Handle handle : t) drop(handle);
    check(failed, name);
  }

  uint64_t some(uint64_t value) const {
    uint64_t* made = nullptr;
    if (new_value_) check(new_value_(&made), "new_stable_ivalue");
    else made = new uint64_t;
    *made = value;
    return reinterpret_cast<uint64_t>(made);
  }

  uint64_t list(const std::vector<uint64_t>& items) const {
    void* made = nullptr;
    check(function<int32_t (*)(size_t, void**)>("torch_new_list_reserve_size")(items.size(), &made), "list");
    const auto add = function<int32_t (*)(void*, uint64_t)>("torch_list_push_back");
    for (uint64_t item : items) check(add(made, item), "list");
    return reinterpret_cast<uint64_t>(made);
  }

  std::vector<uint64_t> items(uint64_t list) const {
    void* const handle = reinterpret_cast<void*>(list);
    size_t count = 0;
    check(function<int32_t (*)(void*, size_t*)>("torch_list_size")(handle, &count), "list");
    std::vector<uint64_t> found(count);
    const auto get = function<int32_t (*)(void*, size_t, uint64_t*)>("torch_list_get_item");
    for (size_t n = 0; n < count; n++) check(get(handle, n, &found[n]), "list");
    check(function<int32_t (*)(void*)>("torch_delete_list")(handle), "list");
    return found;
  }

  uint64_t string(const std::string& text) const {
    void* made = nullptr;
    const auto copy = function<int32_t (*)(const char*, size_t, void**)>("torch_new_string_handle");
    check(copy(text.data(), text.size(), &made), "string");
    return reinterpret_cast<uint64_t>(made);
  }

  uint64_t device() const { return uint64_t(uint32_t(device_)) << 32 | uint32_t(-1); }  // of no number

  int32_t number(const std::string& name) const {
    auto found = numbers_.find(name);
    if (found == numbers_.end()) found = numbers_.emplace(name, function<int32_t (*)()>(name)()).first;
    return found->second;
  }

 private:
  template <class F> F optional(const std::string& name) const {
    void* const found = dlsym(library_ ? library_ : RTLD_DEFAULT, name.c_str());
    return reinterpret_cast<F>(found);
  }
  template <class F> F function(const std::string& name) const {
    const F found = optional<F>(name);
    if (!found) throw Error("this libtorch has no " + name + "; dcompile needs torch 2.11 or later");
    return found;
  }
  void check(int32_t failed, const std::string& name) const {
    if (!failed) return;
    const char* const why = what_ ? what_() : "";
    throw Error(name + " failed" + (why && *why ? std::string(": ") + why : ""));
  }

  void* library_ = nullptr;
  uint64_t abi_ = 0;
  int32_t device_ = 0, strided_ = 0;
  mutable std::map<std::string, int32_t> numbers_;
  int32_t (*call_)(const char*, const char*, uint64_t*, uint64_t) = nullptr;
  int32_t (*from_blob_)(void*, int64_t, const int64_t*, const int64_t*, int64_t, int32_t, int32_t, int32_t, Handle*,
                        int32_t, const uint8_t*, int64_t, void (*)(void*, void*), void*) = nullptr;
  void (*gradients_)(bool) = nullptr;
  bool (*recording_)() = nullptr;
  const char* (*what_)() = nullptr;
  int32_t (*new_value_)(uint64_t**) = nullptr;
};

// --- the program ----------------------------------------------------------------------------------------------------

struct Buffer {
  std::string name, dtype, storage;  // storage: arena, out, input, library; nothing where it lies in another buffer
  int64_t holder = -1;
  bool shares = false;  // with other parts of its holder, which is not written as a whole
  Sizes shape, strides;
  Size offset;
};

struct View {
  size_t buffer;
  Sizes shape, strides;
  Size offset;
};

// One argument of an operator: its kind, and what belongs to it.
struct Value {
  std::string kind, text;
  std::vector<View> view;
  std::vector<Size> size;
  std::vector<Value> inner;
};

struct Result {
  std::string kind;
  std::vector<int64_t> buffers;  // -1: nobody's
};

struct Step {
  enum Kind { kKernel, kProduct, kOperator, kShim } kind;
  std::string name, overload, function, origin;
  int64_t (*kernel)(const int64_t* const*) = nullptr;
  std::vector<size_t> arguments;
  std::vector<std::vector<View>> views;
  Sizes sizes;
  std::vector<double> numbers;
  std::vector<Value> values;
  std::vector<Result> results;
  std::vector<size_t> drop;
};

struct Symbol {
  size_t input;
  std::string what;
  size_t dim;
  Size factor, rest;
};

struct Program {
  std::map<std::string, size_t> symbols, names;
  std::vector<Symbol> sources;
  std::vector<Buffer> buffers;
  std::vector<size_t> inputs;
  std::vector<Step> steps;
  std::vector<std::vector<View>> outputs;
  std::vector<Size> arena_bytes;
  std::string operator_name;  // of the first step that needs torch

  explicit Program(const Json& said) {
    if (said.has("refused")) throw Error("the C++ runner cannot run this program: " + said["refused"].string());
    for (const Json& symbol : said["symbols"].list()) symbols.emplace(symbol[0].string(), symbols.size());
    for (const auto& [name, unused] : said["buffers"].object()) names.emplace(name, names.size());
    for (const auto& [name, buffer] : said["buffers"].object()) buffers.push_back(read_buffer(name, buffer));
    for (const Json& name : said["inputs"].list()) inputs.push_back(at(name));
    for (const Json& s : said["symbols"].list())
      sources.push_back({at(s[1]), s[2].string(), size_t(s[3].integer()), Size(s[4], symbols), Size(s[5], symbols)});
    for (const Json& step : said["steps"].list()) steps.push_back(read_step(step));
    for (const Json& output : said["outputs"].list()) outputs.push_back(maybe_view(output));
    arena_bytes.emplace_back(said["arena_bytes"], symbols);
  }

 private:
  size_t at(const Json& name) const {
    const auto found = names.find(name.string());
    if (found == names.end()) throw Error("no buffer " + name.string());
    return found->second;
  }
  Sizes sizes(const Json& said) const {
    Sizes found;
    for (const Json& size : said.list()) found.emplace_back(size, symbols);
    return found;
  }
  Buffer read_buffer(const std::string& name, const Json& said) const {
    Buffer made{name, said["dtype"].string(), "", -1, false, sizes(said["shape"]), sizes(said["strides"]),
                Size(said["offset"], symbols)};
    if (said.has("storage")) made.storage = said["storage"].string();
    else made.holder = int64_t(at(said["in"])), made.shares = said["shares"].boolean();
    return made;
  }
  View read_view(const Json& said) const {
    return {at(said["buffer"]), sizes(said["shape"]), sizes(said["strides"]), Size(said["offset"], symbols)};
  }
  std::vector<View> maybe_view(const Json& said) const {
    return said.is(Json::kNull) ? std::vector<View>() : std::vector<View>{read_view(said)};
  }
  Value read_value(const Json& said) const {
    Value made;
    made.kind = said[0].string();
    if (made.kind == "tensor") made.view.push_back(read_view(said[1]));
    else if (made.kind == "int") made.size.emplace_back(said[1], symbols);
    else if (made.kind == "some") made.inner.push_back(read_value(said[1]));
    else if (made.kind == "list") for (const Json& item : said[1].list()) made.inner.push_back(read_value(item));
    else if (made.kind != "none") made.text = said[1].written();
    return made;
  }
  Step read_step(const Json& said) {
    Step made;
    made.origin = said["origin"].string();
    for (const Json& name : said["drop"].list()) made.drop.push_back(at(name));
    if (said.has("kernel")) {
      made.kind = Step::kKernel;
      made.name = said["kernel"].string();
      for (const Json& name : said["arguments"].list()) made.arguments.push_back(at(name));
      for (const Json& symbol : said["sizes"].list()) made.sizes.emplace_back(symbol, symbols);
    } else if (said.has("product")) {
      made.kind = Step::kProduct;
      made.name = said["product"].string();
      for (const Json& view : said["views"].list()) made.views.push_back(maybe_view(view));
      made.sizes = sizes(said["sizes"]);
    } else {
      made.kind = said.has("shim") ? Step::kShim : Step::kOperator;
      made.name = said["operator"].string();
      made.overload = said["overload"].string();
      if (operator_name.empty()) operator_name = made.name;
      if (made.kind == Step::kShim) {
        made.function = said["shim"].string();
        for (const Json& view : said["views"].list()) made.views.push_back(maybe_view(view));
        for (const Json& number : said["numbers"].list())
          made.numbers.push_back(std::strtod(number.string().c_str(), nullptr));
      } else {
        for (const Json& value : said["arguments"].list()) made.values.push_back(read_value(value));
        for (const Json& result : said["results"].list()) made.results.push_back(read_result(result));
      }
    }
    return made;
  }
  Result read_result(const Json& said) const {
    Result made{said[0].string(), {}};
    const auto add = [&](const Json& name) { made.buffers.push_back(name.is(Json::kNull) ? -1 : int64_t(at(name))); };
    if (made.kind == "tensor") add(said[1]);
    if (made.kind == "list") for (const Json& name : said[1].list()) add(name);
    return made;
  }
};

// What a call knows of each buffer, and the memory that it lies in.
class Call {
 public:
  Call(const Program& program, const Torch* torch, char* arena, std::vector<int64_t> symbols)
      : program_(program), torch_(torch), arena_(arena), symbols_(std::move(symbols)), slots_(program.buffers.size()),
        rooms_(program.buffers.size()) {}

  void give(size_t buffer, const Tensor& tensor) { slots_[buffer] = {tensor.as<char>(), tensor.owner, true}; }

  void run(const Step& step) {
    switch (step.kind) {
      case Step::kKernel: kernel(step); break;
      case Step::kProduct: product(step); break;
      case Step::kOperator: call_operator(step); break;
      case Step::kShim: shim(step); break;
    }
    for (size_t buffer : step.drop) slots_[buffer] = Slot(), rooms_[buffer] = Slot();
  }

  Tensor look(const View& view) {
    const Buffer& buffer = program_.buffers[view.buffer];
    const Slot& slot = place(view.buffer);
    return {slot.data + view.offset(symbols_) * itemsize(buffer.dtype), buffer.dtype, values(view.shape, symbols_),
            values(view.strides, symbols_), slot.owner};
  }

  // A result that nobody else's memory is: what looks at an argument or a parameter is copied.
  Tensor result(const View& view) {
    Tensor found = look(view);
    return found.owner ? found : laid_out(found, found.strides);
  }

 private:
  struct Slot {
    char* data = nullptr;
    std::shared_ptr<void> owner;
    bool known = false;
  };

  // Where a buffer lies; what is not there yet is allocated.
  const Slot& place(size_t number) {
    Slot& slot = slots_[number];
    if (slot.known) return slot;
    const Buffer& buffer = program_.buffers[number];
    if (buffer.holder >= 0) {
      const Slot& room = buffer.shares ? place(size_t(buffer.holder)) : room_of(size_t(buffer.holder));
      slot = {room.data + buffer.offset(symbols_), room.owner, true};
    } else if (buffer.storage == "arena") {
      slot = {arena_ + buffer.offset(symbols_), nullptr, true};
    } else if (buffer.storage == "out") {
      slot = fresh(buffer);
    } else {
      throw Error("buffer " + buffer.name + " is used before it is there");
    }
    return slot;
  }

  // Memory in which others lie after a buffer: its own if it is the program's, as much anew otherwise.
  const Slot& room_of(size_t number) {
    const Buffer& buffer = program_.buffers[number];
    if (buffer.storage == "out" || buffer.storage == "arena" || buffer.holder >= 0) return place(number);
    if (!rooms_[number].known) rooms_[number] = fresh(buffer);
    return rooms_[number];
  }

  Slot fresh(const Buffer& buffer) const {
    const int64_t count = extent(values(buffer.shape, symbols_), values(buffer.strides, symbols_));
    std::shared_ptr<void> owner = memory(count * itemsize(buffer.dtype));
    char* const data = static_cast<char*>(owner.get());
    return {data, std::move(owner), true};
  }

  void kernel(const Step& step) {
    std::vector<int64_t> words;
    for (size_t buffer : step.arguments) words.push_back(reinterpret_cast<int64_t>(place(buffer).data));
    for (const Size& size : step.sizes) words.push_back(size(symbols_));
    launch(step, words);
  }

  void product(const Step& step) {
    const std::vector<int64_t> numbers = values(step.sizes, symbols_);
    std::vector<int64_t> words = {reinterpret_cast<int64_t>(numbers.data())};
    for (const auto& view : step.views)
      words.push_back(view.empty() ? 0 : reinterpret_cast<int64_t>(look(view[0]).data));
    launch(step, words);
  }

  static void launch(const Step& step, const std::vector<int64_t>& words) {
    std::vector<const int64_t*> places;
    for (const int64_t& word : words) places.push_back(&word);
    const int64_t failed = step.kernel(places.data());
    if (failed == 1) throw Error("integer division by zero in " + step.origin);
    if (failed) throw Error("index " + std::to_string(failed >> 2) + " is out of bounds in " + step.origin);
  }

  void shim(const Step& step) {
    std::vector<Torch::Handle> tensors;
    for (const auto& view : step.views) tensors.push_back(torch_->wrap(look(view.at(0))));
    torch_->product(step.function, tensors, step.numbers.at(0), step.numbers.at(1));
  }

  void call_operator(const Step& step) {
    std::vector<uint64_t> stack;
    for (const Value& value : step.values) stack.push_back(pack(value));
    stack.resize(std::max(stack.size(), step.results.size()));
    torch_->call(step.name, step.overload, stack);
    for (size_t n = 0; n < step.results.size(); n++) {
      const Result& result = step.results[n];
      if (result.kind == "tensor") take(stack[n], result.buffers.at(0), step);
      if (result.kind != "list") continue;
      const std::vector<uint64_t> items = torch_->items(stack[n]);
      for (size_t m = 0; m < items.size(); m++)
        take(items[m], m < result.buffers.size() ? result.buffers[m] : -1, step);
    }
  }

  // A tensor that an operator has returned, with the strides that kernels were made for.
  void take(uint64_t handle, int64_t number, const Step& step) {
    Torch::Handle tensor = reinterpret_cast<Torch::Handle>(handle);
    if (number < 0) {
      torch_->drop(tensor);
      return;
    }
    const Buffer& buffer = program_.buffers[size_t(number)];
    Tensor found = torch_->unwrap(tensor, buffer.dtype);
    const std::vector<int64_t> shape = values(buffer.shape, symbols_), strides = values(buffer.strides, symbols_);
    if (found.shape != shape || found.dtype != buffer.dtype)
      throw Error(step.name + " returned " + found.dtype + " " + shown(found.shape) + ", not " + buffer.dtype + " " +
                  shown(shape) + " (" + step.origin + ")");
    if (!lies_so(found, strides)) found = laid_out(found, strides);
    slots_[size_t(number)] = {found.as<char>(), found.owner, true};
  }

  uint64_t pack(const Value& value) {
    if (value.kind == "none") return 0;
    if (value.kind == "some") return torch_->some(pack(value.inner.at(0)));
    if (value.kind == "tensor") return reinterpret_cast<uint64_t>(torch_->wrap(look(value.view.at(0))));
    if (value.kind == "int") return uint64_t(value.size.at(0)(symbols_));
    if (value.kind == "bool") return value.text == "true";
    if (value.kind == "string") return torch_->string(value.text);
    if (value.kind == "device") return torch_->device();
    if (value.kind == "float") {
      const double number = std::strtod(value.text.c_str(), nullptr);
      uint64_t word;
      std::memcpy(&word, &number, 8);
      return word;
    }
    if (value.kind == "list") {
      std::vector<uint64_t> items;
      for (const Value& item : value.inner) items.push_back(pack(item));
      return torch_->list(items);
    }
    return uint64_t(uint32_t(torch_->number("aoti_torch_" + value.kind + "_" + value.text)));
  }

  const Program& program_;
  const Torch* torch_;
  char* arena_;
  std::vector<int64_t> symbols_;
  std::vector<Slot> slots_, rooms_;
};

// --- checks ---------------------------------------------------------------------------------------------------------

inline std::set<std::string> cpu_flags() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.compare(0, 5, "flags") == 0 || line.compare(0, 8, "Features") == 0) {
      std::istringstream words(line.substr(line.find(':') + 1));
      return {std::istream_iterator<std::string>(words), std::istream_iterator<std::string>()};
    }
  return {};
}

inline Json read_manifest(const std::string& folder) {
  const std::string path = folder + "/manifest.json";
  struct stat status;
  if (stat(folder.c_str(), &status) == 0 && S_ISREG(status.st_mode))
    throw Error(folder + " is a file; unpack the archive, and give the folder");
  const std::string text = MappedFile(path).text();
  Json outer;
  try {
    outer = Json::parse(text);
    if (outer["sha256"].string() == Sha256::of(outer["manifest"].string().data(), outer["manifest"].string().size()))
      return Json::parse(outer["manifest"].string());
  } catch (const Error& error) {
    throw Error(path + " is damaged (" + error.what() + "); export the model again");
  }
  throw Error(path + " is damaged: its checksum differs; export the model again");
}

inline void check_machine(const std::string& folder, const Json& manifest) {
  const int64_t format = manifest["format"].integer();
  if (format != kFormat)
    throw Error(folder + " has format " + std::to_string(format) + ", this runner reads " + std::to_string(kFormat) +
                "; export the model again");
  struct utsname here;
  uname(&here);
  const Json& there = manifest["machine"];
  for (const auto& [wanted, found] : {std::pair<std::string, std::string>{there["system"].string(), here.sysname},
                                      {there["machine"].string(), here.machine}})
    if (wanted != found) throw Error(folder + " is for " + wanted + ", this machine is " + found + "; export it here");
  const std::set<std::string> flags = cpu_flags();
  std::string missing;
  for (const Json& flag : there["flags"].list())
    if (!flags.count(flag.string())) missing += (missing.empty() ? "" : ", ") + flag.string();
  if (!missing.empty())
    throw Error(folder + " is for a processor with " + missing.substr(0, 80) +
                ", which this one lacks; export the model on a machine of this kind");
}

}  // namespace detail

// A loaded program. The folder may change only after the model is gone.
class Model {
 public:
  explicit Model(const std::string& folder, const Options& options = {}) {
    const detail::Json manifest = detail::read_manifest(folder);
    detail::check_machine(folder, manifest);
    for (const auto& [name, digest] : manifest["files"].object()) {
      const detail::MappedFile file(folder + "/" + name);
      if (detail::Sha256::of(file.data(), file.size()) != digest.string())
        throw Error(folder + "/" + name + " is damaged: its checksum differs; export the model again");
    }
    program_.reset(new detail::Program(detail::Json::parse(detail::MappedFile(folder + "/steps.json").text())));
    if (!program_->operator_name.empty())
      torch_.reset(new detail::Torch(options.torch_library, program_->operator_name, manifest["torch"].string()));
    load_kernels(folder, manifest["libraries"]);
    load_tensors(folder, manifest);
    for (const detail::Json& argument : manifest["arguments"].list()) add_argument(argument);
    for (const detail::Json& result : manifest["results"].list())
      if (result[0].string() == "result") add_result(size_t(result[1].integer()));
    for (const detail::Json& changed : manifest["changed"].list())
      changed_.emplace_back(size_t(changed[0].integer()), changed[1].string());
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const std::vector<Argument>& arguments() const { return arguments_; }

  std::vector<Tensor> operator()(const std::vector<Tensor>& arguments) {
    const std::lock_guard<std::mutex> one_call(mutex_);
    const std::vector<Tensor> given = fitted(arguments);
    std::vector<Tensor> inputs;
    for (const auto& [tensor, name, place] : inputs_) inputs.push_back(tensor ? tensors_.at(name) : given.at(place));
    const std::vector<int64_t> symbols = sizes_of(inputs);
    reserve(program_->arena_bytes[0](symbols));
    std::unique_ptr<detail::Torch::NoGradients> quiet;
    if (torch_) quiet.reset(new detail::Torch::NoGradients(*torch_));
    detail::Call call(*program_, torch_.get(), static_cast<char*>(arena_.get()), symbols);
    for (size_t n = 0; n < inputs.size(); n++) call.give(program_->inputs[n], inputs[n]);
    for (const detail::Step& step : program_->steps) call.run(step);
    for (const auto& [place, name] : changed_) {
      const Tensor& to = tensors_.at(name);
      detail::copy(to.as<char>(), to.strides, call.look(program_->outputs.at(place).at(0)));
    }
    std::vector<Tensor> results;
    for (size_t place : results_) results.push_back(call.result(program_->outputs.at(place).at(0)));
    return results;
  }

 private:
  struct Input { bool is_tensor; std::string name; size_t place; };

  void load_kernels(const std::string& folder, const detail::Json& libraries) {
    std::map<std::string, detail::Library> loaded;
    for (detail::Step& step : program_->steps) {
      if (step.kind != detail::Step::kKernel && step.kind != detail::Step::kProduct) continue;
      const std::string path = folder + "/" + libraries[step.name].string();
      const auto found = loaded.try_emplace(path, path).first;
      step.kernel = reinterpret_cast<decltype(step.kernel)>(found->second.find(step.name + "_at"));
    }
  }

  void load_tensors(const std::string& folder, const detail::Json& manifest) {
    file_.reset(new detail::MappedFile(folder + "/tensors.bin"));
    for (const auto& [name, said] : manifest["tensors"].object()) {
      Tensor made{nullptr, said["dtype"].string(), said["shape"].integers(), said["strides"].integers(), nullptr};
      const int64_t offset = said["offset"].integer();
      const int64_t end = offset + detail::extent(made.shape, made.strides) * itemsize(made.dtype);
      if (offset < 0 || end > int64_t(file_->size())) throw Error(folder + "/tensors.bin is too short for " + name);
      made.data = file_->data() + offset;
      tensors_.emplace(name, std::move(made));
    }
    for (const detail::Json& input : manifest["inputs"].list()) {
      const bool tensor = input[0].string() == "tensor";
      inputs_.push_back({tensor, tensor ? input[1].string() : "", tensor ? 0 : size_t(input[1].integer())});
    }
    for (const detail::Json& name : manifest["graph"]["constants"].list())
      inputs_.push_back({true, manifest["constants"][name.string()].string(), 0});
    if (inputs_.size() != program_->inputs.size())
      throw Error(folder + " has another number of inputs than its program");
  }

  void add_result(size_t place) {
    if (program_->outputs.at(place).empty())
      throw Error("result " + std::to_string(place) + " is no tensor, which the C++ runner cannot return");
    results_.push_back(place);
  }

  void add_argument(const detail::Json& said) {
    places_.push_back(said.has("constant") ? -1 : int64_t(arguments_.size()));
    if (places_.back() < 0) return;
    Argument made{said["dtype"].string(), {}, {}, said["strides"].is(detail::Json::kNull)};
    if (!made.any_strides) made.strides = said["strides"].integers();
    for (const detail::Json& size : said["shape"].list()) {
      if (size.is(detail::Json::kNumber)) made.shape.push_back({"", size.integer(), size.integer()});
      else made.shape.push_back({size[0].string(), size[1].integer(),
                                 size[2].is(detail::Json::kNull) ? INT64_MAX : size[2].integer()});
    }
    arguments_.push_back(std::move(made));
  }

  // The arguments at their places in the model's call, checked, as the program's strides are.
  std::vector<Tensor> fitted(const std::vector<Tensor>& given) const {
    if (given.size() != arguments_.size())
      throw Error("called with " + std::to_string(given.size()) + " tensors, exported with " +
                  std::to_string(arguments_.size()));
    std::map<std::string, int64_t> known;
    std::vector<Tensor> found(places_.size());
    for (size_t n = 0; n < places_.size(); n++)
      if (places_[n] >= 0) found[n] = fitted(given[size_t(places_[n])], size_t(places_[n]), known);
    return found;
  }

  Tensor fitted(const Tensor& given, size_t number, std::map<std::string, int64_t>& known) const {
    const Argument& wanted = arguments_[number];
    bool fits = given.dtype == wanted.dtype && given.shape.size() == wanted.shape.size() &&
                given.strides.size() == given.shape.size();
    std::string text;
    for (size_t n = 0; n < wanted.shape.size(); n++) {
      const Argument::Size& size = wanted.shape[n];
      text += (n ? ", " : "") + (size.name.empty() ? std::to_string(size.low)
          : size.name + " (" + std::to_string(size.low) + " to " +
            (size.high == INT64_MAX ? "any" : std::to_string(size.high)) + ")");
      fits = fits && size.low <= given.shape[n] && given.shape[n] <= size.high &&
             (size.name.empty() || known.emplace(size.name, given.shape[n]).first->second == given.shape[n]);
    }
    if (!fits)
      throw Error("argument " + std::to_string(number) + " is " + given.dtype + " of shape " +
                  detail::shown(given.shape) + ", not " + wanted.dtype + " of shape [" + text + "]");
    const std::vector<int64_t> strides = wanted.any_strides ? row_major(given.shape) : wanted.strides;
    if (!detail::lies_so(given, strides)) return detail::laid_out(given, strides);
    Tensor same = given;
    same.strides = strides;
    same.owner = nullptr;  // the caller's: what is returned must not look at it
    return same;
  }

  std::vector<int64_t> sizes_of(const std::vector<Tensor>& inputs) const {
    std::vector<int64_t> symbols;
    for (const detail::Symbol& symbol : program_->sources) {
      const auto place = std::find(program_->inputs.begin(), program_->inputs.end(), symbol.input);
      const Tensor& input = inputs.at(size_t(place - program_->inputs.begin()));
      const int64_t value = (symbol.what == "stride" ? input.strides : input.shape).at(symbol.dim);
      symbols.push_back((value - symbol.rest(symbols)) / symbol.factor(symbols));
    }
    return symbols;
  }

  void reserve(int64_t bytes) {
    if (arena_ && bytes <= arena_bytes_) return;
    arena_ = nullptr;
    arena_ = detail::memory(bytes);
    arena_bytes_ = bytes;
  }

  std::unique_ptr<detail::Program> program_;
  std::unique_ptr<detail::Torch> torch_;
  std::unique_ptr<detail::MappedFile> file_;
  std::map<std::string, Tensor> tensors_;
  std::vector<Input> inputs_;
  std::vector<Argument> arguments_;
  std::vector<int64_t> places_;
  std::vector<size_t> results_;
  std::vector<std::pair<size_t, std::string>> changed_;
  std::mutex mutex_;
  std::shared_ptr<void> arena_;
  int64_t arena_bytes_ = 0;
};

}  // namespace dcompile
