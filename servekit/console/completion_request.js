// Builds the body of a request to /v1 from the form.

export const MAIN_PARAMETERS = ["max_tokens", "temperature", "seed"];
export const SAMPLING_PARAMETERS = ["top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"];

// Returns {path, body}. With `turns`, the whole turns of a chat so far, it is the chat's next turn; without, a completion.
// An empty field is not sent, so that the server's own default applies.
export function buildRequest(form, modelName, turns = null) {
	const fields = Object.fromEntries(new FormData(form));
	const body = modelName ? { model: modelName } : {};
	if (turns) {
		const system = fields.system ? [{ role: "system", content: fields.system }] : [];
		body.messages = [...system, ...turns, { role: "user", content: fields.text }];
	} else {
		body.prompt = fields.text;
	}
	if (fields.n !== "1") body.n = Number(fields.n);
	for (const name of [...MAIN_PARAMETERS, ...SAMPLING_PARAMETERS]) {
		if (fields[name]) body[name] = Number(fields[name]);
	}
	const stop = parseLines(fields.stop);
	if (stop.length) body.stop = stop;
	const kind = fields.structure;
	if (kind) {
		// A JSON schema is sent as text. As an object, its properties could change their order, and its numbers their digits.
		const value = kind === "choice" ? parseLines(fields.structure_text) : fields.structure_text;
		body.structured_outputs = { [kind]: value };
	}
	body.stream = true;
	body.stream_options = { include_usage: true, continuous_usage_stats: true };
	return { path: turns ? "v1/chat/completions" : "v1/completions", body };
}

// One string per line. A line in double quotes is read as JSON, for strings that a line cannot hold, such as "\n".
function parseLines(text) {
	return text
		.split("\n")
		.filter((line) => line.trim())
		.map((line) => {
			if (!/^".*"$/.test(line.trim())) return line;
			try {
				return JSON.parse(line);
			} catch {
				return line; // a string with quotes around it
			}
		});
}
