"""Regenerate protos/*_pb2* from protos/brigade.proto: python -m tools.generate_protos"""

from pathlib import Path
from typing import Annotated

import grpc_tools
import typer
from grpc_tools import protoc

from worker.platform.run import run_command

ROOT = Path(__file__).resolve().parent.parent


def main(
    folder: Annotated[Path, typer.Argument(help="Write protos/ there instead.", show_default=False)] = ROOT,
) -> int:
    """Regenerate the Python code of the messages between nodes."""
    include = Path(grpc_tools.__file__).parent / "_proto"
    outputs = [f"--{kind}={folder}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    return protoc.main(["protoc", f"-I{ROOT}", f"-I{include}", *outputs, "protos/brigade.proto"])


if __name__ == "__main__":
    run_command(main)
