"""Regenerate protos/*_pb2* from protos/brigade.proto. Run from the repository root: python -m tools.generate_protos"""

from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    include = Path(grpc_tools.__file__).parent / "_proto"
    arguments = ["protoc", f"-I{ROOT}", f"-I{include}"]
    outputs = [f"--{kind}={ROOT}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    return protoc.main([*arguments, *outputs, "protos/brigade.proto"])


if __name__ == "__main__":
    raise SystemExit(main())
