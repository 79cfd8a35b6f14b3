// Writes a request as a curl command or a Python program. The API key is never in it: it is read from $API_KEY.

// Characters that terminals and editors do not show, such as marks that change the direction of writing.
const INVISIBLE = /[\u007f-\u009f\u2028\u2029\p{Cf}\u{e0100}-\u{e01ef}]/gu;

// Fields that OpenAI's client takes only in extra_body.
const EXTRA_FIELDS = ["top_k", "min_p", "repetition_penalty", "structured_outputs"];

// `request` is what buildRequest returns, `baseUrl` the address of the page.
export function toCurl({ path, body }, baseUrl, needsKey) {
	return [
		`curl -N ${quoteForShell(new URL(path, baseUrl).href)}`,
		...(needsKey ? ['-H "Authorization: Bearer $API_KEY"'] : []),
		"-H 'Content-Type: application/json'",
		`--data-raw ${quoteForShell(toJson(body))}`,
	].join(" \\\n  ");
}

export function toPython({ path, body }, baseUrl, needsKey) {
	const isChat = path.includes("chat");
	// The client requires a model's name. The server takes an empty one for the model that it has.
	const fields = Object.entries({ model: "", ...body });
	const extraFields = fields.filter(([name]) => EXTRA_FIELDS.includes(name));
	const clientArguments = fields
		.filter(([name]) => !EXTRA_FIELDS.includes(name))
		.map(([name, value]) => `${name}=${toPythonLiteral(value)}`);
	if (extraFields.length) clientArguments.push(`extra_body=${toPythonLiteral(Object.fromEntries(extraFields))}`);
	const key = needsKey ? 'os.environ["API_KEY"]' : '"any"';
	return `${needsKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${toPythonString(new URL("v1", baseUrl).href)}, api_key=${key})
stream = client.${isChat ? "chat." : ""}completions.create(
    ${clientArguments.join(",\n    ")},
)
answers = [""] * ${body.n ?? 1}
for chunk in stream:
    for choice in chunk.choices:
        answers[choice.index] += ${isChat ? 'choice.delta.content or ""' : "choice.text"}
print(*answers, sep="\\n")
`;
}

// In single quotes a POSIX shell changes nothing. A single quote itself ends them and is written as \'.
function quoteForShell(text) {
	return `'${text.replaceAll("'", `'\\''`)}'`;
}

// JSON, with invisible characters as \uXXXX. A character beyond U+FFFF becomes two of these, a surrogate pair.
function toJson(value) {
	return JSON.stringify(value).replace(INVISIBLE, (character) =>
		character.split("").map((codeUnit) => `\\u${hex(codeUnit.charCodeAt(0), 4)}`).join(""),
	);
}

// A JSON string is a Python string too, except for surrogate pairs: Python has \UXXXXXXXX.
function toPythonString(text) {
	return JSON.stringify(text).replace(INVISIBLE, (character) => `\\U${hex(character.codePointAt(0), 8)}`);
}

function toPythonLiteral(value) {
	if (value === true) return "True";
	if (typeof value === "string") return toPythonString(value);
	if (Array.isArray(value)) return `[${value.map(toPythonLiteral).join(", ")}]`;
	if (typeof value !== "object") return JSON.stringify(value); // numbers; the form makes no false and no null
	const items = Object.entries(value).map(([name, item]) => `${toPythonString(name)}: ${toPythonLiteral(item)}`);
	return `{${items.join(", ")}}`;
}

function hex(number, width) {
	return number.toString(16).padStart(width, "0");
}
