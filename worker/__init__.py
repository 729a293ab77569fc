"""What every node shares, and everything that touches MLX. Knows nothing of the coordinator."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own remarks on closed connections are not for users
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # nor are those of transformers on long prompts
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # in what is forked to run another program gRPC may crash
# names are found as everywhere on this machine: gRPC's own resolver knows nothing of Bonjour (`mini.local`)
os.environ.setdefault("GRPC_DNS_RESOLVER", "native")
