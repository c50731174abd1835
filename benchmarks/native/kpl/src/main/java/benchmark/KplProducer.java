package benchmark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.google.common.util.concurrent.FutureCallback;
import com.google.common.util.concurrent.Futures;
import com.google.common.util.concurrent.MoreExecutors;
import java.io.BufferedInputStream;
import java.io.DataInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.net.HttpURLConnection;
import java.net.URI;
import java.net.URL;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.TreeMap;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicInteger;
import software.amazon.awssdk.auth.credentials.AwsBasicCredentials;
import software.amazon.awssdk.auth.credentials.StaticCredentialsProvider;
import software.amazon.kinesis.producer.KinesisProducer;
import software.amazon.kinesis.producer.KinesisProducerConfiguration;
import software.amazon.kinesis.producer.UserRecordResult;

/**
 * Amazon's KPL with a callback for each record and at most 40,000 outstanding ones.
 *
 * <p>It reads its task from standard input (benchmarks/peer_programs/native_rival.py describes it), warms up, measures,
 * and prints its figures as one line of JSON. Its figures are those of the JVM and of the KPL's child process together.
 */
public final class KplProducer {
    private static final int MAX_OUTSTANDING = 40_000;

    private record UserRecord(String key, byte[] data) {}

    private final KinesisProducer producer;
    private final String stream;
    private final Semaphore outstanding = new Semaphore(MAX_OUTSTANDING);
    private final AtomicInteger successful = new AtomicInteger();
    private final FutureCallback<UserRecordResult> callback = new FutureCallback<>() {
        @Override
        public void onSuccess(UserRecordResult result) {
            if (result.isSuccessful()) {
                successful.incrementAndGet();
            }
            outstanding.release();
        }

        @Override
        public void onFailure(Throwable error) {
            outstanding.release();
        }
    };

    private KplProducer(JsonNode task) {
        URI endpoint = URI.create(task.get("endpoint_url").asText());
        AwsBasicCredentials credentials =
                AwsBasicCredentials.create(System.getenv("AWS_ACCESS_KEY_ID"), System.getenv("AWS_SECRET_ACCESS_KEY"));
        stream = task.get("stream").asText();
        producer = new KinesisProducer(new KinesisProducerConfiguration()
                .setKinesisEndpoint(endpoint.getHost())
                .setKinesisPort(endpoint.getPort())
                .setCloudwatchEndpoint(endpoint.getHost())
                .setCloudwatchPort(endpoint.getPort())
                .setStsEndpoint(endpoint.getHost())
                .setStsPort(endpoint.getPort())
                .setVerifyCertificate(false)
                .setRegion(task.get("region").asText())
                .setCredentialsProvider(StaticCredentialsProvider.create(credentials))
                .setMetricsLevel("none")
                .setLogLevel("error")
                .setRecordMaxBufferedTime(100)
                .setRateLimit(Long.MAX_VALUE)
                .setTempDirectory(task.get("directory").asText()));
    }

    public static void main(String[] arguments) {
        try {
            measure();
            System.exit(0);
        } catch (Exception error) {
            System.err.println("Error: " + error);
            System.exit(1);
        }
    }

    private static void measure() throws Exception {
        DataInputStream input = new DataInputStream(new BufferedInputStream(System.in, 1 << 20));
        JsonNode task = new ObjectMapper().readTree(new String(readPiece(input), StandardCharsets.UTF_8));
        List<UserRecord> warmUp = readRecords(input, task.get("warm_up_count").asInt());
        List<UserRecord> measured = readRecords(input, task.get("measured_count").asInt());
        KplProducer program = new KplProducer(task);
        for (int round = 0; round < task.get("warm_up_rounds").asInt(); round++) {
            program.putAll(warmUp);
        }
        program.waitForResults();
        System.gc();
        post(new URL(task.get("control_url").asText() + "/start"));

        program.successful.set(0);
        List<KplProcess> processes = KplProcess.all();
        long startedAt = System.nanoTime();
        KplProcess.Times before = KplProcess.timesOf(processes);
        program.putAll(measured);
        program.waitForResults();
        KplProcess.Times after = KplProcess.timesOf(processes);
        double wallSeconds = (System.nanoTime() - startedAt) / 1e9;

        Map<String, Object> figures = new LinkedHashMap<>();
        figures.put("acknowledged", program.successful.get());
        figures.put("cpu_seconds", after.seconds() - before.seconds());
        figures.put("system_seconds", after.systemSeconds() - before.systemSeconds());
        figures.put("wall_seconds", wallSeconds);
        figures.put("rss_bytes_peak", KplProcess.peakRssBytes(processes));
        String java = Integer.toString(Runtime.version().feature());
        figures.put("versions", new TreeMap<>(Map.of("amazon-kinesis-producer", version(), "Java", java)));
        System.out.println(new ObjectMapper().writeValueAsString(figures));
        program.producer.destroy();
    }

    private void putAll(List<UserRecord> records) throws InterruptedException {
        for (UserRecord record : records) {
            outstanding.acquire();
            Futures.addCallback(
                    producer.addUserRecord(stream, record.key(), ByteBuffer.wrap(record.data())),
                    callback,
                    MoreExecutors.directExecutor());
        }
    }

    private void waitForResults() throws InterruptedException {
        producer.flush();
        outstanding.acquire(MAX_OUTSTANDING);
        outstanding.release(MAX_OUTSTANDING);
    }

    private static List<UserRecord> readRecords(DataInputStream input, int count) throws IOException {
        List<UserRecord> records = new ArrayList<>(count);
        while (records.size() < count) {
            records.add(new UserRecord(new String(readPiece(input), StandardCharsets.UTF_8), readPiece(input)));
        }
        return records;
    }

    private static byte[] readPiece(DataInputStream input) throws IOException {
        byte[] piece = new byte[input.readInt()];
        input.readFully(piece);
        return piece;
    }

    private static void post(URL url) throws IOException {
        HttpURLConnection connection = (HttpURLConnection) url.openConnection();
        connection.setDoOutput(true);
        connection.getOutputStream().write("{}".getBytes(StandardCharsets.UTF_8));
        if (connection.getResponseCode() != 200) {
            throw new IOException("POST /start was answered with status " + connection.getResponseCode());
        }
    }

    private static String version() throws IOException {
        String path = "/META-INF/maven/software.amazon.kinesis/amazon-kinesis-producer/pom.properties";
        Properties properties = new Properties();
        try (InputStream stream = KinesisProducer.class.getResourceAsStream(path)) {
            properties.load(stream);
        }
        return properties.getProperty("version");
    }
}
