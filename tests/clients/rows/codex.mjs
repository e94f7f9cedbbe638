// @openai/codex as shipped, with a provider of its own: its tools are taken, and it sees that its
// context is full by itself (its own prompt nearly fills that of the server here).
import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { mkdtempSync, writeFileSync } from 'node:fs';
import { homedir } from 'node:os';
import { join } from 'node:path';
import { V1, run } from './client.mjs';

const PROVIDER = `model = "agent"
model_provider = "here"
[model_providers.here]
name = "here"
base_url = "${V1}"
wire_api = "responses"
`;

async function exec(row) {
  const home = mkdtempSync(join(process.env.CLIENTS_HOME ?? homedir(), 'codex-'));
  writeFileSync(join(home, 'config.toml'), PROVIDER);
  const program = new URL('./node_modules/.bin/codex', import.meta.url).pathname;
  const done = spawnSync(program, ['exec', '--skip-git-repo-check', 'Find the record'], {
    cwd: home,
    env: { ...process.env, CODEX_HOME: home },
    input: '',
    timeout: 90000,
    encoding: 'utf8',
  });
  const said = done.stdout + done.stderr;
  assert.match(said, /One moment\./, said.slice(-2000));
  assert.match(said, /unsupported call: look_up/, said.slice(-2000));
  assert.match(said, /ran out of room in the model's context window/, said.slice(-2000));
  row.shown = 'text, a call, a full context';
}

await run({ 'exec, custom provider': exec }, '@openai/codex');
