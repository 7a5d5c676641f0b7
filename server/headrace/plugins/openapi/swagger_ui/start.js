// Shows this server's own description; the page of the first model is opened, ready to be run.
"use strict";

const open = (ui) => {
  const document = ui.specSelectors.specJson().toJS();
  const operations = Object.values(document.paths).flatMap((path) => Object.values(path));
  const first = operations.find((operation) => operation.tags?.includes("models"));
  if (first && !location.hash) {
    ui.layoutActions.show(["operations-tag", "models"], true);
    ui.layoutActions.show(["operations", "models", first.operationId], true);
  }
};

const ui = SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#ui",
  deepLinking: true,
  defaultModelsExpandDepth: 0,
  docExpansion: "none",
  filter: true,
  tryItOutEnabled: true,
  validatorUrl: null,
  onComplete: () => open(ui),
});
