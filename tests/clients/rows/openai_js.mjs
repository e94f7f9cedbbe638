// openai and @anthropic-ai/sdk (Node): ten turns, and a full context.
import Anthropic from '@anthropic-ai/sdk';
import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { ASK, RESULT, SCHEMA, TOO_LONG, URL_, V1, checkAgent, run } from './client.mjs';

const openai = new OpenAI({ baseURL: V1, apiKey: 'none', maxRetries: 1 });
const anthropic = new Anthropic({ baseURL: URL_, apiKey: 'none', maxRetries: 0 });

async function chat(row) {
  const messages = [{ role: 'user', content: ASK }];
  const tools = [{ type: 'function', function: { name: 'look_up', parameters: SCHEMA } }];
  for (let turn = 0; turn < 10; turn++) {
    const stream = openai.chat.completions.stream({
      model: 'agent',
      messages,
      tools,
      stream_options: { include_usage: true },
    });
    const answer = await stream.finalChatCompletion();
    const message = answer.choices[0].message;
    const [call] = message.tool_calls;
    row.calls.push(JSON.parse(call.function.arguments));
    row.cached.push(answer.usage.prompt_tokens_details.cached_tokens);
    row.tokens += answer.usage.completion_tokens;
    messages.push(message, { role: 'tool', tool_call_id: call.id, content: RESULT });
  }
  checkAgent(row);
}

async function messages(row) {
  const sent = [{ role: 'user', content: ASK }];
  const tools = [{ name: 'look_up', input_schema: SCHEMA }];
  for (let turn = 0; turn < 10; turn++) {
    const stream = anthropic.messages.stream({ model: 'agent', max_tokens: 500, messages: sent, tools });
    const answer = await stream.finalMessage();
    const call = answer.content.at(-1);
    row.calls.push(call.input);
    row.cached.push(answer.usage.cache_read_input_tokens);
    row.tokens += answer.usage.output_tokens;
    const result = { type: 'tool_result', tool_use_id: call.id, content: RESULT };
    sent.push({ role: 'assistant', content: answer.content }, { role: 'user', content: [result] });
  }
  checkAgent(row);
}

async function overflow(row) {
  const ask = openai.chat.completions.create({
    model: 'agent',
    messages: [{ role: 'user', content: TOO_LONG }],
  });
  await assert.rejects(ask, (error) => error.code === 'context_length_exceeded');
  row.shown = 'context_length_exceeded';
}

await run(
  { 'chat, streamed, 10 turns': chat, 'messages, streamed, 10 turns': messages, 'context overflow': overflow },
  'openai',
);
