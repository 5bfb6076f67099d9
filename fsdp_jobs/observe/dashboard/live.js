// Fetches the page's content again every two seconds while it is visible. The server has escaped it.
const main = document.querySelector("main");
const trouble = document.querySelector("#trouble");

async function refresh() {
  try {
    const answer = await fetch(main.dataset.source, { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    const text = await answer.text();
    const open = [...main.querySelectorAll("details")].map((d) => d.open);
    if (text !== refresh.shown) {
      main.innerHTML = refresh.shown = text;
      main.querySelectorAll("details").forEach((d, i) => { d.open = open[i] ?? false; });
    }
    trouble.textContent = "";
  } catch (error) {
    trouble.textContent = `not up to date: ${error.message}`;
  }
}

async function live() {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise((done) => setTimeout(done, 2000));
  }
}

live();
