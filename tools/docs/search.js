// Search in index.js, which has each heading with the text below it. It needs no network: a page may be a file.
"use strict";
const field = document.getElementById("search"), list = document.getElementById("found"), most = 30;

field.addEventListener("input", () => {
  const words = field.value.toLowerCase().split(/\s+/).filter((w) => w.length > 1);
  const found = [];
  for (const e of words.length ? index : []) {
    const title = (e.Page + " " + e.Heading).toLowerCase(), text = e.Text.toLowerCase();
    if (!words.every((w) => title.includes(w) || text.includes(w))) continue;
    found.push({ e, rank: words.filter((w) => title.includes(w)).length, at: text.indexOf(words[0]) });
  }
  found.sort((a, b) => b.rank - a.rank);
  list.replaceChildren(...found.slice(0, most).map(({ e, at }) => {
    const item = document.createElement("li"), link = document.createElement("a"), around = document.createElement("small");
    link.href = field.dataset.root + e.URL;
    link.textContent = e.Page === e.Heading ? e.Page : e.Page + ": " + e.Heading;
    around.textContent = e.Text.slice(Math.max(0, at - 60), Math.max(0, at) + 120);
    item.append(link, around);
    return item;
  }));
});
