// A place to drop pictures, with what was chosen and what comes with the program.
// props.value is a list of {key, name}; setting it tells Python of the change.
const input = element.querySelector("input[type=file]");
const drop = element.querySelector(".drop");
const said = element.querySelector(".said");
const chosen = element.querySelector(".chosen");

function say(text, wrong = false) {
  said.textContent = text;
  said.classList.toggle("alert", wrong);
}

function show() {
  chosen.replaceChildren(...(props.value || []).map(entry => {
    const item = document.createElement("li");
    const image = document.createElement("img");
    image.src = `pictures/${encodeURIComponent(entry.key)}`;
    image.alt = "";
    const name = document.createElement("span");
    name.textContent = entry.name;
    const remove = document.createElement("button");
    remove.type = "button";
    remove.textContent = "×";
    remove.ariaLabel = `Take ${entry.name} away`;
    remove.onclick = () => { choose(props.value.filter(each => each !== entry)); input.focus(); };
    item.append(image, name, remove);
    return item;
  }));
  const keys = (props.value || []).map(entry => entry.key);
  for (const button of element.querySelectorAll(".gallery button"))
    button.ariaPressed = String(keys.includes(button.dataset.key));
}

function choose(entries) {
  props.value = entries.map(entry => ({key: entry.key, name: entry.name}));
  show();
}

function add(entry) {
  const others = (props.value || []).filter(each => each.key !== entry.key);
  choose(props.most > 1 ? [...others, entry].slice(-props.most) : [entry]);
}

async function send(file) {
  if (file.size > props.bytes)
    throw new Error(`${file.name} has ${(file.size / 1e6).toFixed(1)} MB; this page takes at most ` +
      `${props.bytes / 1e6}. Make the picture smaller first.`);
  const answer = await fetch(`pictures?name=${encodeURIComponent(file.name)}`, {method: "POST", body: file});
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

async function take(files) {
  say("Sending…");
  try {
    for (const file of [...files].slice(0, props.most)) add(await send(file));
    say("");
  } catch (error) {
    say(error instanceof TypeError ? "The server does not answer. Is it still running?" : error.message, true);
  }
}

input.addEventListener("change", async () => { await take(input.files); input.value = ""; });
for (const kind of ["dragover", "dragleave", "drop"])
  drop.addEventListener(kind, event => {
    event.preventDefault();
    drop.classList.toggle("over", kind === "dragover");
    if (kind === "drop" && event.dataTransfer.files.length) take(event.dataTransfer.files);
  });
element.addEventListener("click", event => {
  const button = event.target.closest(".gallery button");
  if (!button) return;
  const entry = {key: button.dataset.key, name: button.dataset.name};
  if (button.ariaPressed === "true") choose(props.value.filter(each => each.key !== entry.key));
  else add(entry);
});
watch("value", show);
show();
