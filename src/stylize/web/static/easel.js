// The slider between before and after.
element.addEventListener("input", event => {
  const compare = event.target.closest(".compare");
  if (compare) compare.style.setProperty("--shown", `${event.target.value}%`);
});
