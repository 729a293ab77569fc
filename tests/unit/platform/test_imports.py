"""A worker starts without what only coordinators need. In a process of its own: this one has imported everything."""

import os
import subprocess
import sys

import worker

SCRIPT = """
import sys
from worker.platform.installation import skip_init

skip_init("mlx_lm")
skip_init("no_such_package")
import worker.node.serve
from mlx_lm.models import cache, qwen3

assert qwen3.Model and cache.KVCache
print(*(name in sys.modules for name in ("transformers", "mlx_lm.generate", "huggingface_hub")))
"""


def test_a_worker_imports_models_and_neither_tokenizers_nor_the_hub() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False False False\n", "")


def test_grpc_leaves_forked_processes_alone() -> None:
    """Or it now and then crashes a worker of our own between fork and exec."""
    assert worker.__doc__ and os.environ["GRPC_ENABLE_FORK_SUPPORT"] == "0"
