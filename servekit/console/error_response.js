// Describes a response that is not 200: by the server's own message if there is one.

export async function describeErrorResponse(response) {
	const { error } = await response.json().catch(() => ({}));
	const message = error?.message ?? `The server answered ${response.status} ${response.statusText}.`;
	const details = [];
	if (error?.param && !message.includes(error.param)) details.push(error.param);
	const retryAfterS = response.headers.get("Retry-After");
	if (retryAfterS) details.push(`try again in ${retryAfterS} s`);
	return details.length ? `${message} (${details.join("; ")})` : message;
}
