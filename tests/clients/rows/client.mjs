// What the rows of Node packages share; see client.py.
import assert from 'node:assert/strict';
import { readFileSync, readSync } from 'node:fs';

export const URL_ = process.env.CLIENTS_URL;
export const V1 = `${URL_}/v1`;
// The other server's model does what each agent's own tools ask for, three times.
export const URL_WORKER = process.env.CLIENTS_WORKER_URL;
export const WORKER_KEY = 'worker-key';
export const WORKER_TURNS = 3;
export const SAID = 'All three records are found.';
export const ARGUMENTS = { key: 'Bérgen 🏔', days: 3 };
export const ASK = 'Find the record. '.repeat(8);
export const RESULT = 'The record holds nothing of note. ';
export const TOO_LONG = 'word '.repeat(20000);
export const SCHEMA = {
  type: 'object',
  properties: { key: { type: 'string' }, days: { type: 'integer' } },
  required: ['key', 'days'],
};

export function checkAgent(row, turns = 10) {
  assert.deepEqual(row.calls, Array(turns).fill(ARGUMENTS));
  const rising = row.cached.slice(1);
  assert.equal(row.cached.length, turns);
  assert.deepEqual(rising, [...rising].sort((a, b) => a - b));
  assert(rising[0] > 0 && rising.at(-1) > rising[0]);
}

// Lets the runner read the server's counters before the next requests.
function wait() {
  const byte = Buffer.alloc(1);
  while (process.env.CLIENTS_HOME) {
    try {
      if (!readSync(0, byte, 0, 1) || byte[0] === 10) return;
    } catch (error) {
      if (error.code !== 'EAGAIN') throw error;
    }
  }
}

export async function run(rows, name) {
  const path = new URL(`./node_modules/${name}/package.json`, import.meta.url);
  const version = JSON.parse(readFileSync(path)).version;
  // A Python package may have the same name.
  console.log(JSON.stringify({ package: `${name} (npm)`, version }));
  for (const [title, work] of Object.entries(rows)) {
    console.log(JSON.stringify({ begin: title }));
    wait();
    const row = { calls: [], cached: [], tokens: 0, shown: '' };
    let error = '';
    try {
      await work(row);
    } catch (failure) {
      error = String(failure).slice(0, 600) || 'failed';
      console.error(failure);
    }
    const cached = row.cached.reduce((sum, n) => sum + n, 0);
    const told = { row: title, ok: !error, error, calls: row.calls.length, cached, tokens: row.tokens };
    console.log(JSON.stringify({ ...told, shown: row.shown }));
    wait();
  }
}
