"""Code that every node shares, and everything that touches MLX. Imports nothing of the coordinator."""

import os
import sys

from worker.platform.open_files import allow_low_limit
from worker.platform.quick_transformers import QuickTransformers

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # hide gRPC's logs of closed connections from users
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # hide transformers' warnings about long prompts
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # gRPC may crash in a fork that runs another program
# use the system's resolver: gRPC's own does not know Bonjour (`mini.local`)
os.environ.setdefault("GRPC_DNS_RESOLVER", "native")
sys.meta_path.insert(0, QuickTransformers())
allow_low_limit()
