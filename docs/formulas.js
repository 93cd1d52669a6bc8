// Draws the formulas of a page, as MathML: browsers have its fonts and layout.
document.addEventListener("DOMContentLoaded", () => {
  const delimiters = [{ left: "\\[", right: "\\]", display: true }];
  renderMathInElement(document.body, { delimiters, output: "mathml" });
});
