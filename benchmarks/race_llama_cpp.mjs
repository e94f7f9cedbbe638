// llama.cpp's part of benchmarks.race, by the package node-llama-cpp, which brings it compiled:
//   node race_llama_cpp.mjs NODE_MODULES MODEL.gguf THREADS
// Reads a line of JSON {kind, prompts, count} at a time and answers {cpu_s, wall_s}; to the kind
// "greedy" the {tokens} behind the first prompt.
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

async function answer({kind, prompts, count}) {
  const context = await model.createContext({
    contextSize: prompts[0].length + count + 8, sequences: prompts.length, batchSize: 512,
    threads: Number(threads),
  });
  if (kind === "greedy") {
    const chosen = [];
    const choices = context.getSequence().evaluate(prompts[0], {temperature: 0, yieldEogToken: true});
    for await (const token of choices) {
      chosen.push(Number(token));
      if (chosen.length === count) break;
    }
    await context.dispose();
    return {tokens: chosen};
  }
  const sequences = prompts.map(() => context.getSequence());
  const run = async (sequence, i) => {
    let left = count;
    // The last token is evaluated for the first answer.
    for await (const _ of sequence.evaluate(prompts[i].slice(-1), {temperature: 0})) {
      if (--left === 0) break;
    }
  };
  if (kind === "decode") {
    for (const [i, own] of sequences.entries()) {
      await own.evaluateWithoutGeneratingNewTokens(prompts[i].slice(0, -1));
    }
  }
  const begin = process.cpuUsage(), start = performance.now();
  if (kind === "prefill") {
    await sequences[0].evaluateWithoutGeneratingNewTokens(prompts[0]);
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
