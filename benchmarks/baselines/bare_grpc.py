"""A minimal grpc.aio server: ModelInfer answers one fixed message and does not read the request.

The difference to it is the cost of a service. GET on `--port` answers 200 once it serves.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import grpc
import uvloop

from service.api.grpc_methods import SERVICE
from service.forms import open_inference_pb2 as pb

ANSWER = pb.ModelInferResponse(
    model_name="lenet",
    model_version="1",
    parameters={name: pb.InferParameter(int64_param=500) for name in ("queue_us", "compute_us")},
    outputs=[
        pb.ModelInferResponse.InferOutputTensor(
            name="probabilities", datatype="FP32", shape=(1, 10)
        ),
        pb.ModelInferResponse.InferOutputTensor(name="label", datatype="INT64", shape=(1,)),
    ],
    raw_output_contents=[bytes(40), bytes(8)],
).SerializeToString()


async def infer(request: bytes, context: Any) -> bytes:
    """The fixed answer."""
    return ANSWER


async def ready(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one HTTP request with 200."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    writer.close()


async def serve(port: int, grpc_port: int) -> None:
    """Serve on 127.0.0.1 until the process is ended."""
    server = grpc.aio.server()
    calls = {"ModelInfer": grpc.unary_unary_rpc_method_handler(infer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, calls),))
    server.add_insecure_port(f"127.0.0.1:{grpc_port}")
    await server.start()
    async with await asyncio.start_server(ready, "127.0.0.1", port):
        await server.wait_for_termination()


def main() -> None:
    """Run the server on uvloop, as the service does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--grpc-port", type=int, required=True)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(arguments.port, arguments.grpc_port))


if __name__ == "__main__":
    main()
