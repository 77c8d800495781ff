// A click on a former result shows it again.
element.addEventListener("click", event => {
  const button = event.target.closest("[data-result]");
  if (button) trigger("pick", {key: button.dataset.result});
});
