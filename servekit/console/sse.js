// Server-sent events out of bytes, however they were cut: within a character, a line, or between \r and \n.

// For each piece of a response's body its events as {type, data}, which may be none: somebody said something.
export async function* eventsOf(response) {
	const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
	let rest = ""; // of a line whose end has not come
	let [type, data] = ["", []];
	try {
		for (;;) {
			const { value: text, done } = await reader.read();
			if (done) return;
			const lines = (rest + text).split(/\r\n|\n|\r(?!$)/); // the last \r may be half of an end
			rest = lines.pop();
			const events = [];
			for (const line of lines) {
				const [, name, value] = /^([^:]*):? ?(.*)$/s.exec(line); // a comment has no name
				if (name === "data") data.push(value);
				else if (name === "event") type = value;
				if (line) continue;
				if (data.length) events.push({ type: type || "message", data: data.join("\n") });
				[type, data] = ["", []];
			}
			yield events;
		}
	} finally {
		reader.cancel().catch(() => {}); // for whoever stops to listen early
	}
}
