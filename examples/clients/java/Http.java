import com.google.gson.Gson;
import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParseException;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.stream.IntStream;

/**
 * Calls a headrace server over plain HTTP, with Java's own client and Gson.
 *
 * <pre>java -cp 'build/classes:build/jars/*' Http [host:port]</pre>
 */
public final class Http {
    /** The server refused a request. */
    static final class Refused extends IOException {
        Refused(int status, String reason) {
            super(status + " " + reason);
        }
    }

    /** An input in JSON; null fields are left out. */
    record Input(
        String name, String datatype, List<Integer> shape, Object data, Object parameters) {}

    private static final String HEADER_SIZE = "inference-header-content-length";
    private static final Duration PATIENCE = Duration.ofSeconds(10);
    private static final Gson GSON = new Gson();

    private final HttpClient client = HttpClient.newBuilder()
        .version(HttpClient.Version.HTTP_1_1)
        .connectTimeout(PATIENCE)
        .build();
    private final String server;

    Http(String server) {
        this.server = server;
    }

    private HttpRequest.Builder to(String path) {
        return HttpRequest.newBuilder(URI.create("http://" + server + path)).timeout(PATIENCE);
    }

    private HttpRequest.Builder post(String path, Object document) {
        return to(path).POST(BodyPublishers.ofString(GSON.toJson(document)));
    }

    /** Send a request; throws {@link Refused} unless it is answered with 200. */
    private HttpResponse<InputStream> send(HttpRequest.Builder request)
            throws IOException, InterruptedException {
        var response = client.send(request.build(), BodyHandlers.ofInputStream());
        if (response.statusCode() == 200) {
            return response;
        }
        String text = new String(response.body().readAllBytes(), StandardCharsets.UTF_8);
        try {
            text = GSON.fromJson(text, JsonObject.class).get("error").getAsString();
        } catch (JsonParseException | NullPointerException notTheServersOwn) {
            // A proxy's page, for example: shown as it is.
        }
        throw new Refused(response.statusCode(), text);
    }

    private JsonObject json(HttpRequest.Builder request) throws IOException, InterruptedException {
        return GSON.fromJson(new String(send(request).body().readAllBytes(), StandardCharsets.UTF_8),
            JsonObject.class);
    }

    private static String described(JsonArray tensors) {
        List<String> texts = new ArrayList<>();
        for (JsonElement each : tensors) {
            JsonObject tensor = each.getAsJsonObject();
            texts.add(tensor.get("name").getAsString() + " "
                + tensor.get("datatype").getAsString() + " " + tensor.get("shape"));
        }
        return String.join(" and ", texts);
    }

    void metadata() throws IOException, InterruptedException {
        JsonObject own = json(to("/v2"));
        System.out.println("server: " + own.get("name").getAsString()
            + " " + own.get("version").getAsString());
        JsonObject model = json(to("/v2/models/digits"));
        System.out.println("digits: " + described(model.getAsJsonArray("inputs"))
            + " -> " + described(model.getAsJsonArray("outputs")));
    }

    /** Tensors as JSON: sums and differences of 16 integers. */
    void plain() throws IOException, InterruptedException {
        List<Integer> shape = List.of(1, 16);
        List<Integer> numbers = IntStream.range(0, 16).boxed().toList();
        List<Integer> ones = Collections.nCopies(16, 1);
        JsonObject response = json(post("/v2/models/simple/infer", Map.of(
            "id", "sums",
            "inputs", List.of(
                new Input("INPUT0", "INT32", shape, numbers, null),
                new Input("INPUT1", "INT32", shape, ones, null)))));
        Map<String, String> data = new HashMap<>();
        for (JsonElement each : response.getAsJsonArray("outputs")) {
            JsonObject output = each.getAsJsonObject();
            String text = output.get("data").toString().replaceAll("[\\[\\]]", "");
            data.put(output.get("name").getAsString(), text);
        }
        System.out.printf("plain: sums %s, differences %s%n", data.get("OUTPUT0"), data.get("OUTPUT1"));
    }

    /** Tensors as little-endian bytes behind the JSON, in both directions. */
    void binary() throws IOException, InterruptedException {
        ByteBuffer pixels = ByteBuffer.allocate(4 * 64).order(ByteOrder.LITTLE_ENDIAN);
        pixels.asFloatBuffer().put(Zero.IMAGE);
        Input image = new Input("image", "FP32", List.of(1, 8, 8), null,
            Map.of("binary_data_size", pixels.capacity()));
        byte[] header = GSON.toJson(Map.of(
                "inputs", List.of(image),
                "parameters", Map.of("binary_data_output", true)))
            .getBytes(StandardCharsets.UTF_8);
        HttpResponse<InputStream> response = send(to("/v2/models/digits/infer")
            .header("content-type", "application/octet-stream")
            .header(HEADER_SIZE, String.valueOf(header.length))
            .POST(BodyPublishers.ofByteArrays(List.of(header, pixels.array()))));
        int size = Integer.parseInt(response.headers().firstValue(HEADER_SIZE).orElseThrow());
        Map<String, ByteBuffer> bytes = new HashMap<>();
        try (InputStream body = response.body()) {
            String text = new String(body.readNBytes(size), StandardCharsets.UTF_8);
            for (JsonElement each : GSON.fromJson(text, JsonObject.class).getAsJsonArray("outputs")) {
                JsonObject output = each.getAsJsonObject();
                int own = output.getAsJsonObject("parameters").get("binary_data_size").getAsInt();
                ByteBuffer read = ByteBuffer.wrap(body.readNBytes(own));
                bytes.put(output.get("name").getAsString(), read.order(ByteOrder.LITTLE_ENDIAN));
            }
        }
        int label = (int) bytes.get("label").getLong(0);
        float probability = bytes.get("probabilities").getFloat(4 * label);
        System.out.printf(Locale.ROOT, "binary: a %d, probability %.3f%n", label, probability);
    }

    /** One server-sent event for each response of a stream. */
    void stream() throws IOException, InterruptedException {
        StringBuilder story = new StringBuilder("The miller");
        HttpResponse<InputStream> response = send(post("/v2/models/storyteller/generate_stream",
            Map.of("text_input", story, "max_tokens", 5)));
        try (var lines = new BufferedReader(
                new InputStreamReader(response.body(), StandardCharsets.UTF_8))) {
            for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                if (!line.startsWith("data:")) {
                    continue; // an empty line ends an event
                }
                JsonObject event = GSON.fromJson(line.substring(5), JsonObject.class);
                if (event.has("error")) {
                    throw new IOException(event.get("error").getAsString());
                }
                story.append(event.get("text_output").getAsString());
            }
        }
        System.out.println("stream: " + story);
    }

    void refused() throws IOException, InterruptedException {
        try {
            send(post("/v2/models/nosuch/infer", Map.of("inputs", List.of())));
        } catch (Refused error) {
            System.out.println("refused: " + error.getMessage());
        }
    }

    public static void main(String[] arguments) throws InterruptedException {
        String server = arguments.length > 0 ? arguments[0] : "127.0.0.1:8000";
        Http http = new Http(server);
        try {
            http.metadata();
            http.plain();
            http.binary();
            http.stream();
            http.refused();
        } catch (Refused error) {
            System.err.println(error.getMessage());
            System.exit(1);
        } catch (IOException error) {
            System.err.println(server + ": " + error);
            System.exit(1);
        }
    }
}
