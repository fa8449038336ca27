"""tools/sanitized.sh: does it find what a kernel reads beyond a tensor, and nothing else?"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = """
import sys, torch, dcompile
call = dcompile.compile(lambda x: x.exp() + 1)
x = torch.ones(1000)
torch.testing.assert_close(call(x), x.exp() + 1)
x.untyped_storage().resize_(int(sys.argv[1]))  # the tensor does not know
call(x)
print("went on")
"""


@pytest.mark.full
@pytest.mark.parametrize(("nbytes", "found"), [(4000, False), (3000, True)])
def test_a_kernel_that_reads_beyond_a_tensor_is_found(nbytes, found):
    command = ["tools/sanitized.sh", sys.executable, "-c", SCRIPT, str(nbytes)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    if ended.returncode == 2:
        pytest.skip(ended.stderr)
    assert (ended.returncode, "went on" in ended.stdout) == (int(found), not found), ended.stderr
    assert ("AddressSanitizer" in ended.stderr) == found and ("3000-byte region" in ended.stderr) == found
