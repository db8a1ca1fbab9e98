// npm's openai package, unchanged: npm install && npm start [URL]
import OpenAI from "openai";

const url = process.argv[2] ?? "http://127.0.0.1:8000";
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const model = "kvbaton-demo";

const answer = await client.chat.completions.create({
  model,
  temperature: 0,
  messages: [{ role: "user", content: "Who are you?" }],
});
console.log(answer.choices[0]?.message.content);

const stream = await client.chat.completions.create({
  model,
  temperature: 0,
  stream: true,
  messages: [{ role: "user", content: 'lamp: fox\ncomet: ginger\nWhat is "comet"?' }],
});
for await (const piece of stream) {
  process.stdout.write(piece.choices[0]?.delta.content ?? "");
}
console.log();
