"""A limit of open files below what mlx-lm asks for."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("hard", "expected"), [(1024, (1024, 1024)), (4096, (2048, 4096))])
def test_mlx_lm_is_imported_whatever_limit_of_open_files_there_is(hard: int, expected: tuple[int, int]) -> None:
    script = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}))
import worker
import mlx_lm.utils
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(expected), done.stderr
