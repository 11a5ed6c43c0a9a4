// A click on a title, or Enter, sorts the table by that column: numbers by value, downwards first, texts by alphabet.
for (const title of document.querySelectorAll("thead th")) {
  title.tabIndex = 0;
  title.title = "Sort by this column";
  const sort = () => {
    const body = title.closest("table").tBodies[0], column = title.cellIndex;
    const down = title.getAttribute("aria-sort") !== "descending";
    const scale = { k: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15 };
    const value = (row) => {
      const text = row.cells[column].textContent.replaceAll(",", "");
      const parts = /^([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)(?: ([kMGTP])(?![a-z]))?/.exec(text);
      return parts ? parts[1] * (scale[parts[2]] ?? 1) : text;
    };
    const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1);
    body.append(...[...body.rows].sort((a, b) => order(value(a), value(b))));
    for (const other of title.parentNode.cells) other.removeAttribute("aria-sort");
    title.setAttribute("aria-sort", down ? "descending" : "ascending");
  };
  title.onclick = sort;
  title.onkeydown = (event) => event.key === "Enter" && sort();
}
