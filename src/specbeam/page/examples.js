// Prompts that show something. Where the number of passes is said, the draft length is fixed, so that each machine has it.

const REPEAT = "Repeat this: \"The tea is in the red box, the sugar is in the blue box, and the coffee is in the green box.\"";
const CITIES = ["Rome is the capital of Italy.", "The capital of Italy is Rome.", "Milan is the capital of Italy.", "The capital of Italy is Milan."].join("\n");
const CITY = JSON.stringify({ type: "object", properties: { name: { enum: ["Paris", "Rome"] }, country: { type: "string", maxLength: 12 }, capital: { type: "boolean" } }, required: ["name", "country", "capital"], additionalProperties: false }, null, 1);

export const EXAMPLES = [
  { title: "Beams with a draft", about: "The answer repeats the prompt, so drafts save passes: 11 instead of 27.", prompt: REPEAT, as: "chat", num_beams: 3, draft: "ngram", num_draft_tokens: 6, draft_width: 3, max_tokens: 64 },
  { title: "One text with a draft", about: "One pass takes a whole phrase: 5 passes instead of 26.", prompt: REPEAT, as: "chat", num_beams: 1, draft: "ngram", num_draft_tokens: 8, draft_width: 1, max_tokens: 64 },
  { title: "A draft that does not help", about: "A new text repeats nothing. The draft saves no pass.", prompt: "Write one sentence about autumn.", as: "chat", num_beams: 4, draft: "ngram", num_draft_tokens: 4, draft_width: 2, max_tokens: 64 },
  { title: "Beams disagree", about: "Four beams without a draft: see which one survives.", prompt: "The old house at the end of the road was", as: "raw", num_beams: 4, draft: "none", stop: ".", max_tokens: 40 },
  { title: "A wide search", about: "Sixteen beams. Zoom out to see the river.", prompt: "Once upon a time", as: "raw", num_beams: 16, draft: "none", stop: ".", max_tokens: 48 },
  { title: "Beams that wait", about: "A sure text: most of the sixteen beams (dotted) wait, and are never evaluated.", prompt: "1, 2, 3, 4, 5, 6, 7, 8, 9, 10,", as: "raw", num_beams: 16, draft: "none", stop: ", 21", max_tokens: 64 },
  { title: "Only these answers", about: "Tokens that the answers do not allow are masked, however likely they are.", prompt: "Which city is the capital of Italy?", as: "chat", num_beams: 4, draft: "none", structured_outputs: CITIES, max_tokens: 16 },
  { title: "JSON by a schema", about: "Keys and punctuation are forced, so they are draft tokens without a draft model. What the schema forbids is masked.", prompt: "Write JSON about Paris, with the keys name, country and capital.", as: "chat", num_beams: 3, draft: "none", schema: CITY, max_tokens: 48 },
  { title: "A drawn text", about: "Temperature 0.8 with a draft: the same seed draws the same text.", prompt: "Write one sentence about autumn.", as: "chat", num_beams: 1, draft: "ngram", temperature: 0.8, seed: 7, max_tokens: 64 },
];
