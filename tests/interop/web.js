// Makes the calls of a JSON file as a page of a browser does, one after another, and prints their
// outcomes as JSON: by Connect's client for Connect or gRPC-Web, or by gRPC-Web's own.
"use strict";
const { readFileSync } = require("node:fs");

const [protocol, address, path] = process.argv.slice(2);
const url = `http://${address}`;
const { descriptors, calls } = JSON.parse(readFileSync(path));
const base64 = (bytes) => Buffer.from(bytes).toString("base64");

function byConnect() {
  const { createFileRegistry, fromBinary, toBinary } = require("@bufbuild/protobuf");
  const { FileDescriptorSetSchema } = require("@bufbuild/protobuf/wkt");
  const { createClient } = require("@connectrpc/connect");
  const transports = require("@connectrpc/connect-web");
  const files = fromBinary(FileDescriptorSetSchema, Buffer.from(descriptors, "base64"));
  const service = createFileRegistry(files).getService("inference.GRPCInferenceService");
  const make =
    protocol === "connect" ? transports.createConnectTransport : transports.createGrpcWebTransport;
  const client = createClient(service, make({ baseUrl: url, useBinaryFormat: true }));
  return async ({ path, request, timeout_ms }) => {
    const method = service.methods.find(({ name }) => path.endsWith(`/${name}`));
    const message = fromBinary(method.input, Buffer.from(request, "base64"));
    try {
      const reply = await client[method.localName](message, { timeoutMs: timeout_ms });
      return { code: 0, message: "", reply: base64(toBinary(method.output, reply)) };
    } catch (error) {
      return { code: error.code, message: error.rawMessage, reply: "" };
    }
  };
}

function byGrpcWeb() {
  globalThis.XMLHttpRequest = require("xhr2");
  const { GrpcWebClientBase, MethodDescriptor, MethodType } = require("grpc-web");
  const client = new GrpcWebClientBase({ format: "binary" });
  const same = (bytes) => bytes;
  return ({ path, request, timeout_ms }) =>
    new Promise((resolve) => {
      const method = new MethodDescriptor(path, MethodType.UNARY, Object, Object, same, same);
      // Not its `deadline`, which it leaves out where that passes before it sends.
      const metadata = { "grpc-timeout": `${timeout_ms}m` };
      const message = new Uint8Array(Buffer.from(request, "base64"));
      client.rpcCall(url + path, message, metadata, method, (error, reply) =>
        resolve({
          code: error ? error.code : 0,
          message: error ? error.message : "",
          reply: reply ? base64(reply) : "",
        }),
      );
    });
}

async function main() {
  const make = protocol === "grpc-web of Google" ? byGrpcWeb() : byConnect();
  const outcomes = [];
  for (const call of calls) outcomes.push(await make(call));
  console.log(JSON.stringify(outcomes));
}

main();
