// Light or dark: as the system has it, until the button is pressed.

export function followTheme(button) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const setTheme = (name) => { document.documentElement.dataset.theme = name; };
  setTheme(system.matches ? "dark" : "light");
  system.addEventListener("change", () => setTheme(system.matches ? "dark" : "light"));
  button.addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
}
