// DOM helpers that both halves of the page share.

export const byId = (id) => document.getElementById(id);

// Strings among the children become text nodes, so text from a client or a model is never parsed as markup.
export function createElement(tagName, properties = {}, ...children) {
	const element = Object.assign(document.createElement(tagName), properties);
	element.append(...children);
	return element;
}

// Writes only a text that differs. A frame in which nothing changed then causes no layout, and a screen reader does not
// announce the same status twice.
export function setText(node, text) {
	if (node.textContent !== text) node.textContent = text;
}

const failedParts = new Map(); // part name -> message on the page

// Runs `action` so that an exception in one part of the page does not stop the others. The first exception of each part
// is shown at the top of the page and logged; later ones of the same part are not.
export async function runGuarded(partName, action) {
	try {
		await action();
	} catch (error) {
		if (failedParts.has(partName)) return;
		failedParts.set(partName, `There is a bug in the ${partName}: ${error.message}. The rest of the page still works.`);
		byId("notice").textContent = [...failedParts.values()].join("\n");
		console.error(error);
	}
}
