// Codex, Claude Code and opencode as shipped: the model runs a command of theirs three times, then
// answers; each of their prompts is longer than 10,000 tokens, and all but its end is cached.
import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { mkdtempSync, writeFileSync } from 'node:fs';
import { homedir } from 'node:os';
import { join } from 'node:path';
import { SAID, URL_WORKER, WORKER_KEY, WORKER_TURNS, run } from './client.mjs';

const ASK = 'Find the record';
const TIMEOUT = 240000;
const MARGIN = 200;

function start(name, program, makeArguments, variables = () => ({})) {
  // Codex wants its folder elsewhere than under /tmp.
  const home = mkdtempSync(join(process.env.CLIENTS_HOME ?? homedir(), `${name}-`));
  const path = new URL(`./node_modules/.bin/${program}`, import.meta.url).pathname;
  const done = spawnSync(path, makeArguments(home), {
    cwd: home,
    env: { ...process.env, HOME: home, XDG_CONFIG_HOME: home, XDG_DATA_HOME: home, ...variables(home) },
    input: '',
    timeout: TIMEOUT,
    encoding: 'utf8',
    maxBuffer: 1 << 26,
  });
  return [done.stdout, done.stdout + done.stderr];
}

const eventsOf = (text) =>
  text.split('\n').filter((line) => line.startsWith('{')).map((line) => JSON.parse(line));

function codexHome(home) {
  writeFileSync(
    join(home, 'config.toml'),
    `model = "worker"
model_provider = "here"
[model_providers.here]
name = "here"
base_url = "${URL_WORKER}/v1"
wire_api = "responses"
env_key = "WORKER_KEY"
`,
  );
  return ['exec', '--json', '--skip-git-repo-check', ASK];
}

async function codex(row) {
  const [told, all] = start('codex', 'codex', codexHome, (home) => ({ CODEX_HOME: home, WORKER_KEY }));
  const events = eventsOf(told);
  const items = events.filter((e) => e.type === 'item.completed').map((e) => e.item);
  const commands = items.filter((item) => item.type === 'command_execution');
  assert.equal(commands.length, WORKER_TURNS, all.slice(-2000));
  assert(commands.every((item) => /found/.test(item.aggregated_output)), all.slice(-2000));
  assert.equal(items.at(-1).text, SAID);
  const { usage } = events.at(-1);
  row.calls = commands;
  row.cached = [usage.cached_input_tokens];
  row.tokens = usage.output_tokens;
  assert(usage.cached_input_tokens > (usage.input_tokens * WORKER_TURNS) / (WORKER_TURNS + 1) - MARGIN);
  row.shown = `${usage.input_tokens} tokens read in ${WORKER_TURNS + 1} turns`;
}

const claude = (ask, ...flags) => [
  'claude',
  'claude',
  () => ['-p', ask, '--model', 'worker', '--allowedTools', 'Bash(echo:*)', '--output-format', 'json', ...flags],
  () => ({
    ANTHROPIC_BASE_URL: URL_WORKER,
    ANTHROPIC_API_KEY: WORKER_KEY,
    CLAUDE_CODE_MAX_OUTPUT_TOKENS: '4096',
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: '1',
  }),
];

async function claudeCode(row) {
  const [told, all] = start(...claude(ASK));
  const done = eventsOf(told).at(-1);
  assert.equal(done?.result, SAID, all.slice(-2000));
  assert.equal(done.num_turns, WORKER_TURNS + 1);
  const { usage } = done;
  row.calls = Array(WORKER_TURNS).fill('Bash');
  row.cached = [usage.cache_read_input_tokens];
  row.tokens = usage.output_tokens;
  const read = usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens;
  assert(usage.cache_read_input_tokens > (read * WORKER_TURNS) / (WORKER_TURNS + 1) - MARGIN);
  row.shown = `${read} tokens read in ${WORKER_TURNS + 1} turns`;
}

async function claudeCodeIsFull(row) {
  // Some 100,000 tokens beside its own prompt: a command line takes no more than 128 KiB.
  const [told, all] = start(...claude('~1 '.repeat(40000)));
  const done = eventsOf(told).at(-1);
  assert.match(done?.result ?? all, /[Pp]rompt is too long/, all.slice(-2000));
  row.shown = 'prompt is too long';
}

function opencodeHome(home) {
  const model = { name: 'worker', limit: { context: 131072, output: 4096 } };
  const options = { baseURL: `${URL_WORKER}/v1`, apiKey: WORKER_KEY };
  const here = { npm: '@ai-sdk/openai-compatible', name: 'here', options, models: { worker: model } };
  const names = { model: 'here/worker', small_model: 'here/worker' };
  writeFileSync(
    join(home, 'opencode.json'),
    JSON.stringify({ ...names, provider: { here }, autoupdate: false, share: 'disabled' }),
  );
  return ['run', '--format', 'json', ASK];
}

async function opencode(row) {
  const [told, all] = start('opencode', 'opencode', opencodeHome, (home) => ({
    OPENCODE_CONFIG: join(home, 'opencode.json'),
    OPENCODE_DISABLE_MODELS_FETCH: '1',
  }));
  const parts = eventsOf(told).map((event) => event.part);
  row.calls = parts.filter((part) => part?.type === 'tool');
  assert.equal(row.calls.length, WORKER_TURNS, all.slice(-2000));
  assert.equal(parts.find((part) => part?.type === 'text').text, SAID);
  const tokens = parts.filter((part) => part?.type === 'step-finish').map((part) => part.tokens);
  row.cached = tokens.map((n) => n.cache.read);
  row.tokens = tokens.reduce((sum, n) => sum + n.output, 0);
  assert(row.cached.slice(1).every((n) => n > tokens[0].input - MARGIN), JSON.stringify(tokens));
  row.shown = `${tokens.at(-1).total} tokens in the last turn`;
}

await run({ 'exec, custom provider': codex }, '@openai/codex');
await run({ 'a task': claudeCode, 'context overflow': claudeCodeIsFull }, '@anthropic-ai/claude-code');
await run({ 'a task': opencode }, 'opencode-ai');
