// Elements, and numbers in words.

export const $ = (id) => document.getElementById(id);

// Strings among the children become text: nothing that anybody sent is ever read as markup.
export function make(name, properties = {}, ...children) {
	const made = Object.assign(document.createElement(name), properties);
	made.append(...children);
	return made;
}

// Writes only what differs: a frame in which nothing moved costs no layout, and no status is read out twice.
export function tell(node, text) {
	if (node.textContent !== text) node.textContent = text;
}

// Whoever stumbles stops no other, and the page says so once.
export async function attempt(what, action) {
	try {
		await action();
	} catch (error) {
		if ($("notice").textContent) return;
		$("notice").textContent = `There is a bug in the ${what}: ${error.message}. The rest of the page goes on.`;
		console.error(error);
	}
}

const WHOLE = new Intl.NumberFormat("en");
export const count = (number = 0) => WHOLE.format(number);

export function seconds(time) {
	if (time == null) return "–";
	return time < 0.9995 ? `${Math.round(time * 1000)} ms` : `${time.toFixed(1)} s`;
}
