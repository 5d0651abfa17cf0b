package logs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/google/go-cmp/cmp"
)

// screen is a console that keeps what it shows, and fails the test on a write
// that isn't one line.
type screen struct {
	t  *testing.T
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if bytes.Count(p, []byte{'\n'}) != 1 || !bytes.HasSuffix(p, []byte{'\n'}) {
		s.t.Errorf("console got %q, want one line per write", p)
	}
	return s.b.Write(p)
}

func (s *screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func TestLoggerWritesOwnLogAndConsole(t *testing.T) {
	s := &screen{t: t}
	l := New(s)
	l.now = func() time.Time { return time.Date(2021, 3, 9, 13, 57, 11, 0, time.UTC) }
	log := l.Logger("networkd").With("link", "eth0")
	log.Debug("not kept")
	log.Info("address set", "addr", "10.0.0.2/24")
	log.Warn("no answer", "err", errors.Join(errors.New("a"), errors.New("b")), "after", 1500*time.Millisecond)
	log.WithGroup("dns").Info("resolvers", "n", 2, Console)
	l.Printf("up after %d s", 3)

	var got []string
	for _, line := range l.Tail("networkd", 0) {
		got = append(got, line[len(timeLayout):])
	}
	want := []string{
		"  address set link=eth0 addr=10.0.0.2/24",
		`  warning: no answer link=eth0 err="a\nb" after=1.5s`,
		"  resolvers link=eth0 dns.n=2",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("own log (-want +got):\n%s", d)
	}
	wantConsole := `[garboard] networkd: no answer link=eth0 err="a\nb" after=1.5s
[garboard] networkd: resolvers link=eth0 dns.n=2
[garboard] up after 3 s
`
	if d := cmp.Diff(wantConsole, s.String()); d != "" {
		t.Errorf("console (-want +got):\n%s", d)
	}
}

// S-276: <time> <name>: controller starting
func TestS276LineFormat(t *testing.T) {
	l := New(nil)
	l.Logger("controller-runtime").Info("k8s.KubeletStaticPodController: controller starting")
	line := l.Tail("controller-runtime", 1)[0]
	stamp, rest, ok := strings.Cut(line, "  ")
	if _, err := time.Parse("2006/01/02 15:04:05", stamp); err != nil || !ok || rest != "k8s.KubeletStaticPodController: controller starting" {
		t.Errorf("got %q", line)
	}
}

func TestConsoleSplitsLongLinesAtCharacters(t *testing.T) {
	s := &screen{t: t}
	l := New(s)
	long := strings.Repeat("ä", 1000)
	l.Printf("%s", long)
	var joined string
	for line := range strings.Lines(s.String()) {
		if len(line) > 1000 {
			t.Errorf("line of %d bytes", len(line))
		}
		joined += strings.TrimSuffix(strings.TrimPrefix(line, consolePrefix), "\n")
	}
	if joined != long {
		t.Errorf("parts don't add up: %q", joined)
	}
}

func TestConsoleIsNotDrowned(t *testing.T) {
	s := &screen{t: t}
	l := New(s)
	now := time.Unix(0, 0)
	l.console.now = func() time.Time { return now }
	for i := range 3 * consoleBurst {
		l.Printf("line %d", i)
	}
	if n := strings.Count(s.String(), "\n"); n != consoleBurst {
		t.Errorf("%d lines shown of a burst, want %d", n, consoleBurst)
	}
	now = now.Add(time.Second)
	l.Printf("later")
	if want := fmt.Sprintf("%d lines not shown here", 2*consoleBurst); !strings.Contains(s.String(), want) {
		t.Errorf("console doesn't say %q", want)
	}
	if !strings.HasSuffix(s.String(), "[garboard] later\n") {
		t.Error("the line after the burst is missing")
	}
}

func TestKmsgPriorities(t *testing.T) {
	var b bytes.Buffer
	l := New(&Kmsg{w: &b})
	l.Printf("hello")
	l.Logger("x").Warn("w")
	l.Logger("x").Error("e")
	want := "<29>[garboard] hello\n<28>[garboard] x: w\n<27>[garboard] x: e\n"
	if b.String() != want {
		t.Errorf("got %q, want %q", b.String(), want)
	}
}

func TestWriterSplitsLines(t *testing.T) {
	l := New(nil)
	w := l.Writer("etcd")
	for _, part := range []string{"on", "e\ntwo\r\n\nth", "ree"} {
		w.Write([]byte(part))
	}
	w.Close()
	w.Write(bytes.Repeat([]byte{'x'}, 3*maxLine))
	got := l.Tail("etcd", 0)
	if d := cmp.Diff([]string{"one", "two", "", "three"}, got[:4]); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	for _, line := range got {
		if len(line) > maxLine {
			t.Errorf("line of %d bytes kept", len(line))
		}
	}
}

func TestRingIsBounded(t *testing.T) {
	l := New(nil)
	log := l.Logger("noisy")
	for i := range 3 * ringLines {
		log.Info("line", "i", i)
	}
	got := l.Tail("noisy", 0)
	if len(got) != ringLines || !strings.HasSuffix(got[len(got)-1], fmt.Sprint("i=", 3*ringLines-1)) {
		t.Errorf("%d lines, last %q", len(got), got[len(got)-1])
	}
	w := l.Writer("fat")
	for range 100 {
		fmt.Fprintln(w, strings.Repeat("x", maxLine-1))
	}
	if n := len(l.Tail("fat", 0)); n*maxLine > ringBytes+maxLine {
		t.Errorf("%d fat lines kept", n)
	}
	if n := len(l.Tail("noisy", 7)); n != 7 {
		t.Errorf("Tail(7) gave %d lines", n)
	}
	if l.Tail("nobody", 1) != nil {
		t.Error("unknown log has lines")
	}
	if d := cmp.Diff([]string{"fat", "noisy"}, l.IDs()); d != "" {
		t.Error(d)
	}
}

// fullDisk is a file on a disk that is full, and half-writes, while full holds.
type fullDisk struct {
	file
	fill *fill
}

type fill struct {
	mu       sync.Mutex
	full     bool
	refusals int
}

func (f fullDisk) Write(p []byte) (int, error) {
	f.fill.mu.Lock()
	defer f.fill.mu.Unlock()
	if f.fill.full {
		f.fill.refusals++
		n, _ := f.file.Write(p[:len(p)/2])
		return n, syscall.ENOSPC
	}
	return f.file.Write(p)
}

func TestFullDiskIsReportedOnceAndCounted(t *testing.T) {
	s := &screen{t: t}
	l := New(s)
	state := &fill{full: true}
	l.disk.open = func(path string) (file, error) {
		f, err := openFile(path)
		return fullDisk{f, state}, err
	}
	dir := t.TempDir()
	if err := l.Persist(dir, 1); err != nil {
		t.Fatal(err)
	}
	w := l.Writer("etcd")
	for i := range 10 {
		fmt.Fprintf(w, "lost %d\n", i)
	}
	// The report on the console is a line of a log, too.
	eventually.That(t, 5*time.Second, "all lines to be refused", func() error {
		state.mu.Lock()
		defer state.mu.Unlock()
		if state.refusals < 11 {
			return fmt.Errorf("%d refused", state.refusals)
		}
		return nil
	})
	state.mu.Lock()
	state.full = false
	state.mu.Unlock()
	fmt.Fprintln(w, "kept")
	l.Release()
	if n := strings.Count(s.String(), "no space left on device"); n != 1 {
		t.Errorf("said %d times:\n%s", n, s)
	}
	got := read(t, filepath.Join(dir, "etcd.log"))
	if !strings.HasPrefix(got, "-- boot 1 --\n") || !strings.HasSuffix(got, "lines of all logs are missing here: the disk was full or too slow\nkept\n") || strings.Contains(got, "lost") {
		t.Errorf("file: %q", got)
	}
	if n := len(l.Tail("etcd", 0)); n != 11 {
		t.Errorf("%d lines in memory, want 11", n)
	}
}

// A disk that hangs must not stop those who log.
func TestStalledDiskDoesNotBlockWriters(t *testing.T) {
	l := New(nil)
	opening, free := make(chan struct{}), make(chan struct{})
	var once sync.Once
	l.disk.open = func(path string) (file, error) {
		once.Do(func() { close(opening) })
		<-free
		return openFile(path)
	}
	dir := t.TempDir()
	if err := l.Persist(dir, 1); err != nil {
		t.Fatal(err)
	}
	w := l.Writer("x")
	fmt.Fprintln(w, "first")
	<-opening // from here on, nothing takes lines out of the queue
	for i := range 2 * queueLines {
		fmt.Fprintln(w, i) // ends only if it doesn't block
	}
	l.disk.mu.Lock()
	dropped := l.disk.dropped
	l.disk.mu.Unlock()
	if dropped < queueLines-1 {
		t.Errorf("%d dropped", dropped)
	}
	close(free)
	l.Release()
}

// stalled is a console whose reader reads nothing until it is let.
type stalled struct {
	screen
	free chan struct{}
}

func (s *stalled) Write(p []byte) (int, error) {
	<-s.free
	return s.screen.Write(p)
}

// A console that nobody reads must not stop those who say something, and what it
// couldn't take is counted once it can again.
func TestStalledConsoleDoesNotBlockSpeakers(t *testing.T) {
	const more = 100
	s := &stalled{screen: screen{t: t}, free: make(chan struct{})}
	l := New(Plain(s))
	now := time.Unix(0, 0)
	l.console.now = func() time.Time { now = now.Add(time.Second); return now } // nothing is too fast
	for i := range 1 + plainQueue + more {
		l.Printf("line %d", i) // ends only if it doesn't block
	}
	l.Flush(time.Millisecond) // the same
	if got := l.Tail(ConsoleID, 1)[0]; !strings.HasSuffix(got, fmt.Sprintf("line %d", plainQueue+more)) {
		t.Errorf("memory ends with %q", got)
	}
	close(s.free)
	l.Flush(eventually.Scale(5 * time.Second))
	l.Printf("up")
	l.Flush(eventually.Scale(5 * time.Second))
	shown, missing := 0, 0
	for line := range strings.Lines(s.String()) {
		_, text, _ := strings.Cut(line, consolePrefix)
		var n int
		if _, err := fmt.Sscanf(text, "line %d\n", &n); err == nil {
			if n != shown {
				t.Fatalf("line %d is shown as number %d", n, shown)
			}
			shown++
		} else if _, err := fmt.Sscanf(text, "%d lines not shown here", &n); err == nil {
			missing += n
		}
	}
	if shown < plainQueue || missing == 0 || shown+missing != 1+plainQueue+more {
		t.Errorf("%d lines are shown and %d missed, of %d", shown, missing, 1+plainQueue+more)
	}
	if !strings.HasSuffix(s.String(), "] [garboard] up\n") {
		t.Errorf("the console ends with %q", s.String()[max(0, len(s.String())-100):])
	}
}

func TestConcurrentUse(t *testing.T) {
	l := New(nil)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			log := l.Logger(fmt.Sprint("svc", i%4))
			for j := range 500 {
				log.Info("x", "j", j)
				if j%100 == 0 {
					l.Tail("svc1", 10)
					l.IDs()
				}
			}
		})
	}
	dir := t.TempDir()
	if err := l.Persist(dir, 1); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	l.Release()
	lines := 0
	for i := range 4 {
		lines += strings.Count(read(t, filepath.Join(dir, fmt.Sprintf("svc%d.log", i))), "\n")
	}
	if lines != 8*500+4 { // and the first line of each file
		t.Errorf("%d lines on disk, want %d", lines, 8*500+4)
	}
}

func TestValueTexts(t *testing.T) {
	l := New(nil)
	l.Logger("x").Info("m\nn", slog.Group("g", "a", 1), "empty", "", "t", time.Unix(0, 0), "any", []int{1, 2}, slog.Attr{})
	got := l.Tail("x", 1)[0][len(timeLayout):]
	if want := `  m; n g.a=1 empty="" t=1970-01-01T00:00:00Z any="[1 2]"`; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestAReaderFollowsAndLosesOnlyWhatTheRingLost(t *testing.T) {
	l := New(nil)
	w := l.Writer("x")
	fmt.Fprint(w, "1\n2\n3\n")
	for tail, want := range map[int]int{0: 3, 2: 2, 9: 3, -1: 0} {
		if lines, lost := l.Read("x", tail).Next(ringBytes); len(lines) != want || lost != 0 {
			t.Errorf("tail %d: %q, %d lost", tail, lines, lost)
		}
	}
	rd := l.Read("x", 1)
	if err := rd.Wait(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	rd.Next(ringBytes)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := rd.Wait(ended, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("nothing new: %v", err)
	}
	waited := make(chan error, 1)
	go func() { waited <- rd.Wait(t.Context(), nil) }()
	for i := range ringLines + 100 {
		fmt.Fprintf(w, "line %d\n", i)
	}
	if err := <-waited; err != nil {
		t.Fatal(err)
	}
	lines, lost := rd.Next(ringBytes)
	if lost != 100 || len(lines) != ringLines || lines[0] != "line 100" {
		t.Errorf("%d lost, %d lines from %q on", lost, len(lines), lines[0])
	}
}

func TestTheConsoleIsALogWhereTheKernelKeepsNone(t *testing.T) {
	var b bytes.Buffer
	l := New(Plain(&b))
	l.Printf("up")
	l.Logger("x").Warn("odd")
	l.Flush(eventually.Scale(5 * time.Second))
	var got []string
	for _, line := range l.Tail(ConsoleID, 0) {
		got = append(got, line[len(timeLayout):])
	}
	if d := cmp.Diff([]string{"  up", "  warning: x: odd"}, got); d != "" {
		t.Error(d)
	}
	if said := b.String(); !strings.Contains(said, "] [garboard] up\n[") || !strings.HasSuffix(said, "] [garboard] x: odd\n") {
		t.Errorf("the console shows %q", said)
	}
	kernel := New(&Kmsg{w: &b})
	kernel.Printf("up")
	if got := kernel.Tail(ConsoleID, 0); got != nil {
		t.Errorf("beside the kernel's log: %q", got)
	}
}
