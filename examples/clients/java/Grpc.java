import com.google.protobuf.ByteString;
import inference.GRPCInferenceServiceGrpc;
import inference.GRPCInferenceServiceGrpc.GRPCInferenceServiceBlockingStub;
import inference.GRPCInferenceServiceGrpc.GRPCInferenceServiceStub;
import inference.InferTensorContents;
import inference.ModelInferRequest;
import inference.ModelInferRequest.InferInputTensor;
import inference.ModelInferResponse;
import inference.ModelMetadataRequest;
import inference.ModelMetadataResponse.TensorMetadata;
import inference.ModelStreamInferResponse;
import inference.ServerMetadataRequest;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.StreamObserver;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import java.util.stream.IntStream;

/**
 * Calls a headrace server over gRPC, by stubs that protoc generates from `protos/`.
 *
 * <pre>java -cp 'build/classes:build/jars/*' Grpc [host:port]</pre>
 */
public final class Grpc {
    private static final int PATIENCE_SECONDS = 10;

    private final ManagedChannel channel;

    Grpc(ManagedChannel channel) {
        this.channel = channel;
    }

    private GRPCInferenceServiceBlockingStub stub() {
        return GRPCInferenceServiceGrpc.newBlockingStub(channel)
            .withDeadlineAfter(PATIENCE_SECONDS, TimeUnit.SECONDS);
    }

    private static String described(List<TensorMetadata> tensors) {
        return tensors.stream()
            .map(tensor -> "%s %s [%s]".formatted(tensor.getName(), tensor.getDatatype(),
                tensor.getShapeList().stream().map(String::valueOf).collect(Collectors.joining(","))))
            .collect(Collectors.joining(" and "));
    }

    void metadata() {
        var own = stub().serverMetadata(ServerMetadataRequest.getDefaultInstance());
        System.out.println("server: " + own.getName() + " " + own.getVersion());
        var model = stub().modelMetadata(ModelMetadataRequest.newBuilder().setName("digits").build());
        System.out.println("digits: " + described(model.getInputsList())
            + " -> " + described(model.getOutputsList()));
    }

    private static InferInputTensor.Builder input(String name, String datatype, long... shape) {
        var tensor = InferInputTensor.newBuilder().setName(name).setDatatype(datatype);
        for (long size : shape) {
            tensor.addShape(size);
        }
        return tensor;
    }

    /** The bytes of a response's outputs by name. */
    private static Map<String, ByteBuffer> outputs(ModelInferResponse response) {
        Map<String, ByteBuffer> bytes = new HashMap<>();
        for (int index = 0; index < response.getOutputsCount(); index++) {
            ByteBuffer raw = response.getRawOutputContents(index).asReadOnlyByteBuffer();
            bytes.put(response.getOutputs(index).getName(), raw.order(ByteOrder.LITTLE_ENDIAN));
        }
        return bytes;
    }

    private static String integers(ByteBuffer raw) {
        return IntStream.range(0, raw.capacity() / 4)
            .mapToObj(index -> String.valueOf(raw.getInt(4 * index)))
            .collect(Collectors.joining(","));
    }

    /** Tensors as numbers in messages; responses are always raw. */
    void plain() {
        var numbers = InferTensorContents.newBuilder()
            .addAllIntContents(IntStream.range(0, 16).boxed().toList());
        var ones = InferTensorContents.newBuilder().addAllIntContents(Collections.nCopies(16, 1));
        var bytes = outputs(stub().modelInfer(ModelInferRequest.newBuilder()
            .setModelName("simple")
            .setId("sums")
            .addInputs(input("INPUT0", "INT32", 1, 16).setContents(numbers))
            .addInputs(input("INPUT1", "INT32", 1, 16).setContents(ones))
            .build()));
        System.out.printf("plain: sums %s, differences %s%n",
            integers(bytes.get("OUTPUT0")), integers(bytes.get("OUTPUT1")));
    }

    /** Tensors as little-endian bytes, which neither side converts. */
    void binary() {
        ByteBuffer pixels = ByteBuffer.allocate(4 * 64).order(ByteOrder.LITTLE_ENDIAN);
        pixels.asFloatBuffer().put(Zero.IMAGE);
        var bytes = outputs(stub().modelInfer(ModelInferRequest.newBuilder()
            .setModelName("digits")
            .addInputs(input("image", "FP32", 1, 8, 8))
            .addRawInputContents(ByteString.copyFrom(pixels))
            .build()));
        int label = (int) bytes.get("label").getLong(0);
        float probability = bytes.get("probabilities").getFloat(4 * label);
        System.out.printf(Locale.ROOT, "binary: a %d, probability %.3f%n", label, probability);
    }

    /** Many responses to one request. Texts are bytes, each after its length in 4 bytes. */
    void stream() {
        StringBuilder story = new StringBuilder("The miller");
        CompletableFuture<Void> end = new CompletableFuture<>();
        GRPCInferenceServiceStub asynchronous = GRPCInferenceServiceGrpc.newStub(channel)
            .withDeadlineAfter(PATIENCE_SECONDS, TimeUnit.SECONDS);
        var requests = asynchronous.modelStreamInfer(new StreamObserver<ModelStreamInferResponse>() {
            @Override
            public void onNext(ModelStreamInferResponse message) {
                if (!message.getErrorMessage().isEmpty()) {
                    end.completeExceptionally(Status.INVALID_ARGUMENT
                        .withDescription(message.getErrorMessage()).asRuntimeException());
                    return;
                }
                ByteBuffer raw = outputs(message.getInferResponse()).get("text_output");
                byte[] text = new byte[raw.getInt()];
                raw.get(text);
                story.append(ByteString.copyFrom(text).toStringUtf8());
            }

            @Override
            public void onError(Throwable error) {
                end.completeExceptionally(error);
            }

            @Override
            public void onCompleted() {
                end.complete(null);
            }
        });
        requests.onNext(ModelInferRequest.newBuilder()
            .setModelName("storyteller")
            .addInputs(input("text_input", "BYTES", 1).setContents(InferTensorContents.newBuilder()
                .addBytesContents(ByteString.copyFromUtf8("The miller"))))
            .addInputs(input("max_tokens", "INT64", 1)
                .setContents(InferTensorContents.newBuilder().addInt64Contents(5)))
            .build());
        requests.onCompleted();
        end.join();
        System.out.println("stream: " + story);
    }

    void refused() {
        try {
            stub().modelInfer(ModelInferRequest.newBuilder().setModelName("nosuch").build());
        } catch (StatusRuntimeException error) {
            if (error.getStatus().getCode() != Status.Code.NOT_FOUND) {
                throw error;
            }
            System.out.println("refused: " + described(error.getStatus()));
        }
    }

    private static String described(Status status) {
        return status.getCode() + " " + status.getDescription();
    }

    public static void main(String[] arguments) {
        String server = arguments.length > 0 ? arguments[0] : "127.0.0.1:8001";
        ManagedChannel channel = ManagedChannelBuilder.forTarget(server).usePlaintext().build();
        Grpc grpc = new Grpc(channel);
        int exit = 0;
        try {
            grpc.metadata();
            grpc.plain();
            grpc.binary();
            grpc.stream();
            grpc.refused();
        } catch (StatusRuntimeException | CompletionException error) {
            Status status = Status.fromThrowable(error);
            String cause = status.getCause() == null ? "" : ": " + status.getCause().getMessage();
            System.err.println(server + ": " + described(status) + cause);
            exit = 1;
        } finally {
            channel.shutdownNow();
        }
        System.exit(exit);
    }
}
