// What the form asks for, as /v1 takes it, and the same to paste elsewhere. What is empty is not sent: the server's own
// default holds.

export const FIRST_NUMBERS = ["max_tokens", "temperature", "seed"];
export const MORE_NUMBERS = ["top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"];

// One a line. One in quotes is read as JSON, for what no line can hold.
function linesOf(text) {
	const lines = text.split("\n").filter((line) => line.trim());
	return lines.map((line) => {
		try {
			return /^".*"$/.test(line.trim()) ? JSON.parse(line) : line;
		} catch {
			return line; // a text with quotes round it
		}
	});
}

// {path, body}. With `messages` it is a chat's next turn, else a prompt.
export function requestOf(form, model, messages) {
	const given = Object.fromEntries(new FormData(form));
	const body = model ? { model } : {};
	if (messages) body.messages = [...messages, { role: "user", content: given.text }];
	else body.prompt = given.text;
	if (given.n !== "1") body.n = Number(given.n);
	for (const name of [...FIRST_NUMBERS, ...MORE_NUMBERS]) {
		if (given[name]) body[name] = Number(given[name]);
	}
	const stop = linesOf(given.stop);
	if (stop.length) body.stop = stop;
	const { structure: kind, structure_text: text } = given;
	// A schema goes as text: as an object its properties could change their order, and its numbers their digits.
	if (kind) body.structured_outputs = { [kind]: kind === "choice" ? linesOf(text) : text };
	body.stream = true;
	body.stream_options = { include_usage: true, continuous_usage_stats: true };
	return { path: messages ? "v1/chat/completions" : "v1/completions", body };
}

// -- to paste: without the key, for whoever pastes it has their own, in $API_KEY

// No terminal or editor would show these.
const UNSEEN = /[\u007f-\u009f\u2028\u2029\p{Cf}\u{e0100}-\u{e01ef}]/gu;

// JSON has halves of characters, Python has not.
function json(value, u = "u", width = 4, each = /[^]/g) {
	return JSON.stringify(value).replace(UNSEEN, (unseen) =>
		unseen.replace(each, (part) => `\\${u}${part.codePointAt().toString(16).padStart(width, 0)}`));
}

// In single quotes a shell leaves everything alone but a single quote.
function shell(text) {
	return `'${text.replaceAll("'", `'\\''`)}'`;
}

export function asCurl({ path, body }, base, needsKey) {
	return [
		`curl -N ${shell(new URL(path, base).href)}`,
		...(needsKey ? ['-H "Authorization: Bearer $API_KEY"'] : []),
		"-H 'Content-Type: application/json'",
		`--data-raw ${shell(json(body))}`,
	].join(" \\\n  ");
}

// What OpenAI's client has no argument for.
const EXTRA = ["top_k", "min_p", "repetition_penalty", "structured_outputs"];

// JSON's texts and numbers are Python's.
function python(value) {
	if (value === true) return "True";
	if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
	if (typeof value !== "object") return json(value, "U", 8, UNSEEN);
	return `{${Object.entries(value).map(([name, item]) => `${json(name)}: ${python(item)}`).join(", ")}}`;
}

export function asPython({ path, body }, base, needsKey) {
	const isChat = path.includes("chat");
	const given = Object.entries({ model: "", ...body }); // the client wants a name; an empty one is the model there is
	const extra = given.filter(([name]) => EXTRA.includes(name));
	const fields = given.filter(([name]) => !EXTRA.includes(name)).map(([name, value]) => `${name}=${python(value)}`);
	if (extra.length) fields.push(`extra_body=${python(Object.fromEntries(extra))}`);
	return `${needsKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${json(new URL("v1", base).href)}, api_key=${needsKey ? 'os.environ["API_KEY"]' : '"any"'})
stream = client.${isChat ? "chat." : ""}completions.create(
    ${fields.join(",\n    ")},
)
answers = [""] * ${body.n ?? 1}
for chunk in stream:
    for choice in chunk.choices:
        answers[choice.index] += ${isChat ? 'choice.delta.content or ""' : "choice.text"}
print(*answers, sep="\\n")
`;
}
