// The one tooltip, beside the token under the pointer or the focus.

const tip = document.getElementById("tip");

export function showTip(target, text) {
  tip.textContent = text;
  tip.hidden = false;
  const { left, top, bottom } = target.getClientRects()[0] ?? target.getBoundingClientRect();
  const { width, height } = tip.getBoundingClientRect();
  const above = top - height - 6;
  tip.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
  tip.style.top = `${above > 0 ? above : bottom + 6}px`;
}

export function hideTip() {
  tip.hidden = true;
}

addEventListener("scroll", hideTip, { passive: true });
