package benchmark;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.stream.Stream;

/** A process of the KPL, the JVM or its child, and its figures in /proc. */
record KplProcess(long id) {
    private static final double TICKS_PER_SECOND = 100;

    record Times(double userSeconds, double systemSeconds) {
        double seconds() {
            return userSeconds + systemSeconds;
        }
    }

    /** Returns this JVM and its child processes. */
    static List<KplProcess> all() {
        ProcessHandle jvm = ProcessHandle.current();
        return Stream.concat(Stream.of(jvm), jvm.descendants()).map(handle -> new KplProcess(handle.pid())).toList();
    }

    /** Returns the CPU time of all threads of these processes. */
    static Times timesOf(List<KplProcess> processes) throws IOException {
        double user = 0;
        double system = 0;
        for (KplProcess process : processes) {
            String stat = Files.readString(process.file("stat"));
            // The name of the program is in parentheses and may contain spaces. User time is field 14 of the line.
            String[] fields = stat.substring(stat.lastIndexOf(')') + 2).split(" ");
            user += Long.parseLong(fields[11]) / TICKS_PER_SECOND;
            system += Long.parseLong(fields[12]) / TICKS_PER_SECOND;
        }
        return new Times(user, system);
    }

    /** Returns the sum of the largest resident sets of these processes. */
    static long peakRssBytes(List<KplProcess> processes) throws IOException {
        long kibibytes = 0;
        for (KplProcess process : processes) {
            for (String line : Files.readAllLines(process.file("status"))) {
                if (line.startsWith("VmHWM:")) {
                    kibibytes += Long.parseLong(line.replaceAll("\\D", ""));
                }
            }
        }
        return kibibytes * 1024;
    }

    private Path file(String name) {
        return Path.of("/proc", Long.toString(id), name);
    }
}
