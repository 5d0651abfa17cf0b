package console

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

const (
	// lookPause is between two looks at the node. Where there are lines only, a status has to stay for that time, and
	// showPause is the shortest time between two.
	lookPause = 5 * time.Second
	showPause = 30 * time.Second
	// readTime is how long an answer stays on a screen.
	readTime = time.Minute

	// The smallest screen has 80 columns and 25 rows: the last one is for what is typed. A row has a label and a text,
	// which may take a second one.
	rows, labelWidth, textWidth, textRows = 24, 12, 68, 2
	// mostAddresses, mostWaits and mostProblems fit on it together.
	mostAddresses, mostWaits, mostProblems = 3, 3, 3

	// keys are the last line of a status.
	keys = "Enter: commands"
	// The kernel's messages, this system's log among them, stay on the first virtual terminal of a screen; the status
	// gets the second one.
	statusTerminal = "/dev/tty2"
	// VT_ACTIVATE of ioctl_console(2), TIOCL_SETKMSGREDIRECT of TIOCLINUX(2const)
	vtActivate, kernelMessages = 0x5606, 11
)

// terminal is where a person reads. A screen is drawn again in its place. Elsewhere, such as on a serial line whose
// text is kept in a file, there are lines only.
type terminal struct {
	io.Reader
	w      io.Writer
	screen bool
	close  func()

	mu       sync.Mutex // guards the following, and the order of writes
	drawn    string     // since the last answer
	answered time.Time
}

// openTerminal opens a console of the kernel. A screen gets a terminal of its own for the status. Closed, it shows the
// log again, whose last lines tell how the machine ends.
func openTerminal(path string) (*terminal, error) {
	const flags = os.O_RDWR | unix.O_NOCTTY | unix.O_NONBLOCK
	tty, err := os.OpenFile(path, flags, 0)
	if err != nil {
		return nil, err
	}
	t := &terminal{Reader: tty, w: tty, close: func() { tty.Close() }}
	if strings.Trim(filepath.Base(path), "0123456789") != "tty" {
		return t, nil
	}
	status, err := os.OpenFile(statusTerminal, flags, 0)
	if err != nil || unix.IoctlSetPointerInt(int(tty.Fd()), unix.TIOCLINUX, kernelMessages|1<<8) != nil {
		return t, nil
	}
	activate := func(terminal int) { _ = unix.IoctlSetInt(int(status.Fd()), vtActivate, terminal) }
	activate(2)
	return &terminal{Reader: status, w: status, screen: true, close: func() { activate(1); status.Close(); tty.Close() }}, nil
}

func (t *terminal) answer(text string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.drawn, t.answered = "", time.Now()
	_, err := io.WriteString(t.w, text)
	return err
}

// ask returns the next line, which isn't shown while it is typed.
func (t *terminal) ask(lines *bufio.Scanner, prompt string) string {
	defer t.quiet()()
	if t.answer(prompt+"\n") != nil || !lines.Scan() {
		return ""
	}
	return lines.Text()
}

// quiet ends the echo of what is typed, until show is called.
func (t *terminal) quiet() (show func()) {
	tty, ok := t.Reader.(*os.File)
	if !ok {
		return func() {}
	}
	echo := func(on bool) {
		raw, err := tty.SyscallConn()
		if err != nil {
			return
		}
		_ = raw.Control(func(fd uintptr) {
			if s, err := unix.IoctlGetTermios(int(fd), unix.TCGETS); err == nil {
				if s.Lflag &^= unix.ECHO; on {
					s.Lflag |= unix.ECHO
				}
				_ = unix.IoctlSetTermios(int(fd), unix.TCSETS, s)
			}
		})
	}
	echo(false)
	return func() { echo(true) }
}

// draw replaces what a screen shows, but not what is being typed below.
func (t *terminal) draw(lines []string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	lines = append(lines, make([]string, rows-len(lines)+1)...)
	text := "\x1b7\x1b[H" + strings.Join(lines, "\x1b[K\r\n") + "\x1b8"
	if time.Since(t.answered) < readTime || text == t.drawn {
		return nil
	}
	clear := ""
	if t.drawn == "" {
		clear = fmt.Sprintf("\x1b[2J\x1b[%d;1H", rows+1)
	}
	t.drawn = text
	_, err := io.WriteString(t.w, clear+text)
	return err
}

// Show writes the status where nothing is typed, as lines.
func Show(ctx context.Context, o Options, w io.Writer) { _ = o.show(ctx, &terminal{w: w}) }

// show shows the status when it says something else. On a screen, the time that passes is something else.
func (o Options) show(ctx context.Context, t *terminal) error {
	var seen, shown string
	var next time.Time
	for range sleep.Every(ctx, lookPause) {
		waits, problems := o.Waiting(), o.Problems()
		lines := o.lines(waits, problems)
		now := strings.Join(o.lines(lists.Of(waits, func(s string) string { return strings.Fields(s)[0] }), problems), "\n")
		var err error
		switch {
		case t.screen:
			err = t.draw(append(lines, keys+"    Alt+F1: the log, Alt+F2: this status"))
		case now == seen && now != shown && time.Now().After(next) && !o.disabled("status"):
			_, err = io.WriteString(t.w, "\n"+strings.Join(append(lines, keys), "\n")+"\n")
			shown, next = now, time.Now().Add(showPause)
		}
		if err != nil {
			return err
		}
		seen = now
	}
	return nil
}

// lines are the status.
func (o Options) lines(waits []string, problems []*garboardv1.Finding) []string {
	if o.disabled("status") {
		return nil
	}
	name, _ := network.Hostnames.Get(o.Store, network.HostnameID)
	own, _ := network.Addresses.Get(o.Store, network.AddressID)
	stage, _ := configuration.Stages.Get(o.Store, configuration.StageID)
	problems = slices.DeleteFunc(slices.Clone(problems), func(f *garboardv1.Finding) bool { return f.Severity < garboardv1.Finding_SEVERITY_WARNING })
	lines := slices.Concat([]string{"Garboard " + boot.Version}, row("name", name.Spec), few("address", "", mostAddresses, lists.Of(own.Spec.All, netip.Prefix.String)),
		row("fingerprint", o.Fingerprint()), row("state", o.state(waits, stage.Spec, len(problems))))
	if o.Ending() {
		return lines
	}
	what := lists.Of(problems, (*garboardv1.Finding).GetWhat)
	if s, err := network.Statuses.Get(o.Store, network.ID); err == nil && stage.Spec.Anonymous() {
		what = append(what, s.Spec.Problems...) // while settings are typed in, nobody waits for doctor
	}
	return slices.Concat(lines, few("waits", "", mostWaits, waits), few("problem", ": gbctl doctor", mostProblems, what), row("next", next(own.Spec.Primary, stage.Spec, problems)))
}

// state is what the node does.
func (o Options) state(waits []string, stage configuration.Stage, problems int) string {
	var runs operation.Spec
	for _, op := range operation.Operations.List(o.Store) {
		if op.Spec.Ended.IsZero() {
			runs = op.Spec
		}
	}
	switch health := kubelet.Health(o.Store); {
	case o.Ending():
		return cmp.Or(runs.Name, "end") + ": services stop"
	case runs.Name != "":
		return strings.Trim(runs.Name+": "+runs.Step, ": ")
	case stage == configuration.Locked:
		return "locked: no key of this machine opens its disk, but a recovery key does"
	case stage == configuration.Maintenance:
		return "maintenance: the machine waits for its configuration"
	case len(waits) > 0:
		return "starts: some services aren't up yet"
	case health.Serves == kubelet.Unknown:
		return "all services are up, but no API server answers"
	case health.Serves != "yes":
		return "all services are up, but Kubernetes doesn't serve here: " + health.Faults.String()
	case problems > 0:
		return "runs, with problems"
	default:
		return "serves: all services are up"
	}
}

// next is what a person may type, mostly at another machine.
func next(own netip.Addr, stage configuration.Stage, problems []*garboardv1.Finding) string {
	node := "gbctl -n " + own.String() + " "
	switch {
	case stage == configuration.Locked && !own.IsValid():
		return "type here: unlock"
	case stage == configuration.Locked:
		return "type here: unlock, or elsewhere: " + node + "unlock --insecure"
	case stage == configuration.Maintenance && !own.IsValid():
		return "type here: network INTERFACE ADDRESS/PREFIX GATEWAY DNS"
	case !own.IsValid():
		return ""
	case stage == configuration.Maintenance:
		return node + "apply-config --insecure -f FILE"
	case slices.ContainsFunc(problems, func(f *garboardv1.Finding) bool { return f.Id == "etcd-waits-for-bootstrap" }):
		return node + "bootstrap    (once, on one control plane of a new cluster)"
	case len(problems) > 0:
		return node + "doctor"
	default:
		return node + "health"
	}
}

// few are the first texts, and how many there are besides.
func few(label, where string, most int, texts []string) (lines []string) {
	for i, text := range texts {
		if i == most {
			return append(lines, row("", fmt.Sprintf("and %d more%s", len(texts)-most, where))...)
		}
		lines = append(lines, row(label, text)...)
		label = ""
	}
	return lines
}

// row is a label and a text, of characters that every terminal has: a stranger may have a say in it, such as a DHCP
// server in a name. Without a text, there is none.
func row(label, text string) (lines []string) {
	words := strings.FieldsFunc(text, func(r rune) bool { return r <= ' ' || r > '~' })
	for len(words) > 0 && len(lines) < textRows {
		line := words[0]
		for words = words[1:]; len(words) > 0 && len(line)+len(words[0]) < textWidth; words = words[1:] {
			line += " " + words[0]
		}
		if left := len(words) > 0 && len(lines) == textRows-1; left || len(line) > textWidth {
			line = line[:min(len(line), textWidth-len("..."))] + "..."
		}
		lines = append(lines, fmt.Sprintf("%-*s%s", labelWidth, label, line))
		label = ""
	}
	return lines
}
