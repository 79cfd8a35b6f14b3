
"use strict";

// Sends the request of one form on /docs and shows the answer below it, as it arrives.
async function send(form) {
  const answer = form.querySelector(".answer");
  const key = document.getElementById("key").value;
  const method = form.dataset.method;
  answer.hidden = false;
  answer.textContent = "…";
  try {
    const response = await fetch(form.elements.path.value, {
      method,
      headers: key ? { Authorization: `Bearer ${key}` } : {},
      body: method === "POST" ? form.elements.body.value : undefined,
    });
    answer.textContent = `${response.status} ${response.statusText}\n\n`;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      answer.textContent += value;
    }
  } catch (error) {
    answer.textContent += `\n${error}`;
  }
}

for (const form of document.querySelectorAll("form")) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(form);
  });
}
