// llama.cpp's part of benchmarks.race, by the package node-llama-cpp, which brings it compiled:
//   node race_llama_cpp.mjs NODE_MODULES MODEL.gguf THREADS
// Reads a line of JSON {kind, tokens, count, together} at a time and answers {cpu_s, wall_s}; to the
// kind "greedy" {tokens}.
import {createInterface} from "node:readline";
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";

const [modules, modelPath, threads] = process.argv.slice(2);
const entry = createRequire(modules + "/").resolve("node-llama-cpp");
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(entry).href);

const llama = await getLlama({
  gpu: false, build: "never", maxThreads: Number(threads), logLevel: LlamaLogLevel.error,
});
const model = await llama.loadModel({modelPath, gpuLayers: 0});

async function answer({kind, tokens, count, together}) {
  const context = await model.createContext({
    contextSize: tokens.length + count + 8, sequences: together, batchSize: 512,
    threads: Number(threads),
  });
  if (kind === "greedy") {
    const chosen = [];
    const choices = context.getSequence().evaluate(tokens, {temperature: 0, yieldEogToken: true});
    for await (const token of choices) {
      chosen.push(Number(token));
      if (chosen.length === count) break;
    }
    await context.dispose();
    return {tokens: chosen};
  }
  const sequences = Array.from({length: together}, () => context.getSequence());
  const run = async (sequence) => {
    let left = count;
    // The last token is evaluated for the first answer.
    for await (const _ of sequence.evaluate([tokens[tokens.length - 1]], {temperature: 0})) {
      if (--left === 0) break;
    }
  };
  if (kind === "decode") {
    for (const own of sequences) await own.evaluateWithoutGeneratingNewTokens(tokens.slice(0, -1));
  }
  const begin = process.cpuUsage(), start = performance.now();
  if (kind === "prefill") {
    await sequences[0].evaluateWithoutGeneratingNewTokens(tokens);
  } else {
    await Promise.all(sequences.map(run));
  }
  const wall = performance.now() - start, used = process.cpuUsage(begin);
  await context.dispose();
  return {cpu_s: (used.user + used.system) / 1e6, wall_s: wall / 1e3};
}

console.log(JSON.stringify({ready: true}));
for await (const line of createInterface({input: process.stdin})) {
  console.log(JSON.stringify(await answer(JSON.parse(line))));
}
process.exit(0);
