// Masks painted over the photograph, one for each purpose; each is sent as a picture, white where it was painted.
// props.value is {photo, styles, layers: {purpose: key}}; Python sets photo and styles, painting sets layers.
const purposes = {keep: ["the photograph stays", "#2f9e6e"]};
for (const [index, colour] of ["#d9480f", "#1c7ed6", "#ae3ec9", "#e0a800"].entries())
  purposes[index + 1] = [`only style ${index + 1} goes`, colour];
const thickness = () => brush.value / 100 * Math.max(canvas.width, canvas.height);
const select = element.querySelector(".layer");
const brush = element.querySelector(".brush");
const erase = element.querySelector(".erase");
const area = element.querySelector(".canvas");
const photo = element.querySelector("img");
const canvas = element.querySelector("canvas");
const said = element.querySelector(".said");
const context = canvas.getContext("2d");
let layers = {};  // purpose: canvas
let shown = null;  // key of the photograph
let last = null;  // where the stroke is, in pixels of the canvas
let cursor = null;  // of the keyboard
let sending = Promise.resolve();

function blank() {
  const layer = document.createElement("canvas");
  layer.width = canvas.width;
  layer.height = canvas.height;
  return layer;
}

function redraw() {
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.globalAlpha = 0.6;
  for (const layer of Object.values(layers)) context.drawImage(layer, 0, 0);
  context.globalAlpha = 1;
  if (cursor && document.activeElement === canvas) {
    context.strokeStyle = "#fff";
    context.lineWidth = 2;
    context.beginPath();
    context.arc(cursor.x, cursor.y, thickness() / 2, 0, 2 * Math.PI);
    context.stroke();
  }
}

function stroke(to) {
  const layer = layers[select.value] ||= blank();
  const pen = layer.getContext("2d");
  pen.globalCompositeOperation = erase.checked ? "destination-out" : "source-over";
  pen.strokeStyle = purposes[select.value][1];
  pen.lineWidth = thickness();
  pen.lineCap = pen.lineJoin = "round";
  pen.beginPath();
  pen.moveTo((last || to).x, (last || to).y);
  pen.lineTo(to.x, to.y + 0.01);  // a line of no length is not drawn
  pen.stroke();
  last = to;
  redraw();
}

function white(layer) {
  const mask = blank();
  const pen = mask.getContext("2d");
  pen.drawImage(layer, 0, 0);
  pen.globalCompositeOperation = "source-in";
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, mask.width, mask.height);
  pen.globalCompositeOperation = "destination-over";
  pen.fillStyle = "#000";
  pen.fillRect(0, 0, mask.width, mask.height);
  return new Promise(done => mask.toBlob(done, "image/png"));
}

async function send(purpose) {
  const layer = layers[purpose];
  if (!layer) return;
  const painted = layer.getContext("2d").getImageData(0, 0, layer.width, layer.height).data.some(value => value);
  const kept = {...props.value.layers};
  delete kept[purpose];
  if (painted) {
    const answer = await fetch(`pictures?name=mask-${purpose}.png`, {method: "POST", body: await white(layer)});
    if (!answer.ok) { said.textContent = await answer.text(); return; }
    kept[purpose] = (await answer.json()).key;
  }
  props.value = {...props.value, layers: kept};
  const names = Object.keys(kept).map(each => purposes[each][0]);
  said.textContent = names.length ? `Painted: where ${names.join("; where ")}.` : "";
}

function finish() {
  if (!last) return;
  last = null;
  const purpose = select.value;
  sending = sending.then(() => send(purpose)).catch(() => { said.textContent = "The server does not answer."; });
}

function place(event) {
  const box = canvas.getBoundingClientRect();
  return {x: (event.clientX - box.left) * canvas.width / box.width,
          y: (event.clientY - box.top) * canvas.height / box.height};
}

function clear() {
  layers = {};
  cursor = last = null;
  redraw();
  said.textContent = "";
}

function update() {
  const {photo: key, styles} = props.value;
  const known = props.purposes.filter(each => each === "keep" || Number(each) <= Math.max(1, styles));
  const before = select.value;
  select.replaceChildren(...known.map(each => new Option(purposes[each][0], each)));
  if (known.includes(before)) select.value = before;
  if (key === shown) return;
  shown = key;
  area.hidden = !key;
  element.querySelector(".hint").hidden = Boolean(key);
  clear();
  if (key) photo.src = `pictures/${encodeURIComponent(key)}`;
}

photo.addEventListener("load", () => {
  canvas.width = photo.naturalWidth;
  canvas.height = photo.naturalHeight;
  clear();
});
canvas.addEventListener("pointerdown", event => {
  event.preventDefault();
  canvas.focus();
  canvas.setPointerCapture(event.pointerId);
  cursor = null;
  stroke(place(event));
});
canvas.addEventListener("pointermove", event => { if (last) stroke(place(event)); });
canvas.addEventListener("pointerup", finish);
canvas.addEventListener("pointercancel", finish);
canvas.addEventListener("keydown", event => {
  const steps = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], " ": [0, 0]};
  const step = steps[event.key];
  if (!step) return;
  event.preventDefault();
  cursor ||= {x: canvas.width / 2, y: canvas.height / 2};
  cursor = {x: Math.min(canvas.width, Math.max(0, cursor.x + step[0] * thickness() / 4)),
            y: Math.min(canvas.height, Math.max(0, cursor.y + step[1] * thickness() / 4))};
  if (event.key === " " || last) stroke(cursor); else redraw();
});
canvas.addEventListener("keyup", event => { if (event.key === " ") finish(); });
canvas.addEventListener("focus", () => {
  if (canvas.matches(":focus-visible")) cursor ||= {x: canvas.width / 2, y: canvas.height / 2};
  redraw();
});
canvas.addEventListener("blur", () => { finish(); redraw(); });
element.querySelector(".clear").addEventListener("click", () => {
  clear();
  props.value = {...props.value, layers: {}};
});
watch("value", update);
update();
