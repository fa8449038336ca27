"""dcompile's door for DeepSpeed, where there is none, or one that is too old."""

import sys

import pytest

from tests.subject import run

GONE = "import sys; sys.modules['deepspeed'] = None"
OLD = "import dcompile.integrations.requirements as asked; asked._version = lambda package: '0.12.3'"


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(("found", "said"), [(GONE, "it is not installed"), (OLD, "0.12.3 is installed")])
def test_the_error_names_the_command(found, said):
    result = run(sys.executable, "-c", f"{found}; import dcompile.integrations.deepspeed")
    assert result.returncode != 0
    last = result.stderr.splitlines()[-1]
    assert "needs deepspeed 0.18 or newer" in last and said in last
    assert "pip install 'deepspeed>=0.18'" in last
