// AI SDK: ten turns over five providers, each with its own route or dialect.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createDeepSeek } from '@ai-sdk/deepseek';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, stepCountIs, tool } from 'ai';
import { z } from 'zod';
import { ASK, RESULT, V1, checkAgent, run } from './client.mjs';

const settings = { baseURL: V1, apiKey: 'none' };
const openai = createOpenAI(settings);
const models = {
  'openai, chat, 10 turns': openai.chat('agent'),
  'openai, responses, 10 turns': openai.responses('agent'),
  'openai-compatible, 10 turns': createOpenAICompatible({ name: 'here', ...settings })('agent'),
  'anthropic, 10 turns': createAnthropic(settings)('agent'),
  'deepseek, 10 turns': createDeepSeek(settings)('agent'),
};

const agent = (model) => async (row) => {
  const answer = await generateText({
    model,
    prompt: ASK,
    maxRetries: 0,
    maxOutputTokens: 500,
    stopWhen: stepCountIs(10),
    tools: {
      look_up: tool({
        description: 'Look a record up.',
        inputSchema: z.object({ key: z.string(), days: z.number() }),
        execute: async (given) => {
          row.calls.push(given);
          return RESULT;
        },
      }),
    },
  });
  row.cached = answer.steps.map(
    (step) => step.usage.inputTokenDetails?.cacheReadTokens ?? step.usage.cachedInputTokens ?? 0,
  );
  row.tokens = answer.totalUsage.outputTokens;
  checkAgent(row);
};

await run(Object.fromEntries(Object.entries(models).map(([name, m]) => [name, agent(m)])), 'ai');
