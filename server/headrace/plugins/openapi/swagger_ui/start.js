// Shows this server's own description; the page of the first model is opened, ready to be run.
// A client's key is used for the description, too, which then has the models that it may know of.
"use strict";

let shown = {}; // headers by which a client is known, until the page is left
const header = ({ schema, value }) =>
  schema.get("type") === "http"
    ? ["authorization", `Bearer ${value}`]
    : [schema.get("name"), value];
const known = {
  statePlugins: {
    auth: {
      wrapActions: {
        authorize: (authorize) => (given) => {
          const done = authorize(given);
          shown = { ...shown, ...Object.fromEntries(Object.values(given).map(header)) };
          ui.specActions.download();
          return done;
        },
        logout: (logout) => (names) => {
          shown = {};
          return logout(names);
        },
      },
    },
  },
};

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
  plugins: [known],
  requestInterceptor: (request) => {
    if (request.loadSpec) Object.assign(request.headers, shown);
    return request;
  },
  onComplete: () => open(ui),
});
