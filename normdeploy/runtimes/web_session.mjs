// Runs one ONNX file in onnxruntime-web. normdeploy.runtimes.web_process starts this program as
//
//     node web_session.mjs PACKAGE DESCRIPTOR THREADS
//
// and sends requests to standard input. Answers go to the file descriptor DESCRIPTOR, because onnxruntime-web prints to
// standard output. Requests and answers are frames: the length of a header (32 bits, little-endian), the header (JSON),
// then the bytes of each array. `sizes` in the header lists the length of each array. Numbers of tensors are only in
// these bytes.
//
//     {do: "start"}                  do nothing; the answer says that onnxruntime-web was found
//     {do: "open", path, external}   open a file; external: [{path: location in the model, data: file}]
//     {do: "open", external: []}     open the model whose bytes follow; it replaces the last one
//     {do: "run", inputs}            run; inputs: [{name, type, dims}]; the answer has outputs: [{name, type, dims}]
//     {do: "bind", key, inputs}      keep the inputs for "repeat"
//     {do: "repeat", key}            run with the kept inputs; the answer has no outputs
//
// An answer with `error` says why a request failed.

import fs from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";
import { Worker, isMainThread, parentPort } from "node:worker_threads";

const ARRAYS = {
  float32: Float32Array,
  float64: Float64Array,
  float16: Uint16Array,
  int8: Int8Array,
  int16: Int16Array,
  int32: Int32Array,
  int64: BigInt64Array,
  uint8: Uint8Array,
  uint16: Uint16Array,
  uint32: Uint32Array,
  uint64: BigUint64Array,
  bool: Uint8Array,
};
// A single read or write of Node.js takes less than 2 GiB.
const MOST = 2 ** 30;

if (isMainThread) {
  main();
} else {
  readRequests();
}

// Reads requests in a thread of its own, so that the process also ends in the middle of a run when normdeploy ends.
function readRequests() {
  for (;;) {
    const header = JSON.parse(Buffer.from(readBytes(readBytes(4).getUint32(0, true)).buffer).toString());
    const arrays = header.sizes.map((size) => readBytes(size).buffer);
    parentPort.postMessage({ header, arrays }, arrays);
  }
}

function readBytes(size) {
  const view = new DataView(new ArrayBuffer(size));
  for (let done = 0; done < size; ) {
    const count = fs.readSync(0, view, done, Math.min(size - done, MOST), null);
    if (count === 0) {
      process.kill(process.pid, "SIGKILL");
    }
    done += count;
  }
  return view;
}

function main() {
  const [folder, descriptor, threads] = process.argv.slice(2);
  const ort = createRequire(path.join(folder, "package.json"))("onnxruntime-web");
  ort.env.wasm.numThreads = Number(threads);
  let session = null;
  const bound = new Map();

  const actions = {
    async start() {
      return {};
    },
    async open(header, [model]) {
      await session?.release();
      session = null;
      const source = model === undefined ? header.path : new Uint8Array(model);
      session = await ort.InferenceSession.create(source, { externalData: header.external });
      return {};
    },
    async run(header, arrays) {
      const results = await session.run(makeFeeds(header, arrays));
      const names = session.outputNames;
      const outputs = names.map((name) => ({ name, type: results[name].type, dims: results[name].dims }));
      const other = outputs.find(({ type }) => !(type in ARRAYS));
      if (other !== undefined) {
        throw new Error(`the output '${other.name}' is ${other.type}, which can't be returned`);
      }
      return { outputs, values: names.map((name) => results[name].data) };
    },
    async bind(header, arrays) {
      bound.set(header.key, makeFeeds(header, arrays));
      return {};
    },
    async repeat(header) {
      await session.run(bound.get(header.key));
      return {};
    },
  };

  function makeFeeds(header, arrays) {
    const pairs = header.inputs.map(({ name, type, dims }, place) => [
      name,
      new ort.Tensor(type, new ARRAYS[type](arrays[place]), dims),
    ]);
    return Object.fromEntries(pairs);
  }

  function answer({ values = [], ...header }) {
    const sizes = values.map((value) => value.byteLength);
    const text = Buffer.from(JSON.stringify({ ...header, sizes }));
    const length = Buffer.alloc(4);
    length.writeUInt32LE(text.length);
    for (const part of [length, text, ...values]) {
      writeBytes(new Uint8Array(part.buffer, part.byteOffset, part.byteLength));
    }
  }

  function writeBytes(bytes) {
    for (let done = 0; done < bytes.length; ) {
      done += fs.writeSync(Number(descriptor), bytes, done, Math.min(bytes.length - done, MOST));
    }
  }

  new Worker(new URL(import.meta.url)).on("message", async ({ header, arrays }) => {
    try {
      answer(await actions[header.do](header, arrays));
    } catch (error) {
      // A failure inside of WebAssembly may be a number.
      answer({ error: error instanceof Error ? error.message : `WebAssembly raised ${error}` });
    }
  });
}
