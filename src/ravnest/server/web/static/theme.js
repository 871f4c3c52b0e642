// Sets the chosen theme before anything is drawn; without a choice the system decides.
const chosen = localStorage.getItem("ravnest-theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
