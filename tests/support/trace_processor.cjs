// Perfetto's own trace processor, as its web page runs it, behind a pipe.
//   node trace_processor.cjs DIRECTORY   (with engine_bundle.js and trace_processor*.wasm)
// Both directions: messages of 4 bytes of length (little-endian) and that many of TraceProcessorRpcStream.
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const directory = process.argv[2];
const port = {
  onmessage: null,
  postMessage(data) {
    const length = Buffer.alloc(4);
    length.writeUInt32LE(data.length);
    fs.writeSync(1, length);
    for (let at = 0; at < data.length; ) at += fs.writeSync(1, data, at);
  },
};
// A worker of a browser, and nothing of node: the module refuses to start where it sees both.
const worker = {
  TextDecoder, TextEncoder, URL, performance, setTimeout, clearTimeout,
  console: { log() {}, info() {}, warn() {}, error: console.error, debug() {} },
  location: { href: "http://localhost/engine_bundle.js" },
  importScripts() {},
  crypto: globalThis.crypto,
  XMLHttpRequest: class {
    open(_method, url) { this.url = String(url); }
    send() {
      const content = fs.readFileSync(path.join(directory, path.basename(this.url)));
      const end = content.byteOffset + content.length;
      this.response = content.buffer.slice(content.byteOffset, end);
    }
  },
};
worker.self = worker;
worker.WorkerGlobalScope = function () {};
const context = vm.createContext(worker);
// Not the whole bundle, which is one line.
process.on("uncaughtException", (error) => { console.error(String(error)); process.exit(1); });
vm.runInContext(fs.readFileSync(path.join(directory, "engine_bundle.js"), "utf8"), context);
worker.onmessage({ data: port });

const Bytes = vm.runInContext("Uint8Array", context);
let pending = Buffer.alloc(0);
process.stdin.on("data", (chunk) => {
  pending = Buffer.concat([pending, chunk]);
  while (pending.length >= 4 && pending.length >= 4 + pending.readUInt32LE(0)) {
    const end = 4 + pending.readUInt32LE(0);
    port.onmessage({ data: Bytes.from(pending.subarray(4, end)) });
    pending = pending.subarray(end);
  }
});
