package console

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/services/system/slots"
)

// rig is a machine with a console.
type rig struct {
	o       Options
	waits   []string
	wrong   []*garboardv1.Finding
	ending  bool
	own     string // fingerprint
	signals []syscall.Signal
	network []config.Network
	keys    []string
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{}
	r.o = Options{
		Store: resource.NewStore(), Log: slog.New(slog.DiscardHandler),
		Waiting: func() []string { return r.waits }, Problems: func() []*garboardv1.Finding { return r.wrong },
		Fingerprint: func() string { return r.own }, Ending: func() bool { return r.ending },
		Network: func(n config.Network) { r.network = append(r.network, n) },
		Signal:  func(s syscall.Signal) error { r.signals = append(r.signals, s); return nil },
		Unlock:  func(key string) error { r.keys = append(r.keys, key); return nil },
		Wipe:    func(device string) error { return fmt.Errorf("%q isn't it", device) },
		kernelLog: func() string {
			return "<6>[    0.1] Linux version 6\n<29>[    2.0] [garboard] maintenance mode: API at https://10.0.0.5\n" +
				"<28>[    3.0] [garboard] networkd: no answer\n<27>[    4.0] [garboard] disks: it is full\n<30>[    5.0] [garboard] udevd: up\n"
		},
	}
	return r
}

func (r *rig) typed(t *testing.T, lines ...string) string {
	t.Helper()
	var screen bytes.Buffer
	if err := r.o.serve(&terminal{Reader: strings.NewReader(strings.Join(lines, "\n") + "\n"), w: &screen}); err != nil {
		t.Fatal(err)
	}
	return screen.String()
}

func put(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestStatus(t *testing.T) {
	r := newRig(t)
	since := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	put(t, slots.Statuses.Put(r.o.Store.As(slots.ID), "A", slots.Status{State: boot.SlotGood, Version: "v1", Running: true, Next: true, Since: since, Reason: "healthy 20s after its boot"}))
	put(t, slots.Statuses.Put(r.o.Store.As(slots.ID), "B", slots.Status{State: boot.SlotTrying, Version: "v2", Next: true, Since: since, Reason: "written"}))
	want := `slot A      good, v1, since 2026-05-01T12:00:00Z, healthy 20s after its boot
slot B      trying and boots next, v2, since 2026-05-01T12:00:00Z, written
`
	if got := r.typed(t, "status"); !strings.HasSuffix(got, want) {
		t.Error(got)
	}
	if got := r.typed(t, "log"); !strings.HasPrefix(got, "maintenance mode: ") || !strings.HasSuffix(got, "disks: it is full\nudevd: up\n") {
		t.Error(got)
	}
}

// written is what a program writes.
type written chan string

func (w written) Write(b []byte) (int, error) {
	w <- string(b)
	return len(b), nil
}

// A person at a serial line sees the status without a command: once it stays as it is, but for the time that passes,
// and at most twice a minute.
func TestStatusByItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		ctx, cancel := context.WithCancel(t.Context())
		screen, done := make(written, 10), make(chan error)
		var up atomic.Bool
		began := time.Now()
		r.o.Waiting = func() []string {
			if up.Load() {
				return nil
			}
			return []string{"apid Starting for " + time.Since(began).String()}
		}
		go func() { done <- r.o.show(ctx, &terminal{w: screen}) }()
		shown := func() string {
			time.Sleep(time.Second)
			synctest.Wait()
			select {
			case text := <-screen:
				return text
			default:
				return ""
			}
		}
		stage := func(s configuration.Stage) {
			put(t, configuration.Stages.Put(r.o.Store.As(configuration.ID), configuration.StageID, s))
		}
		stage(configuration.Maintenance)
		time.Sleep(2 * lookPause)
		if got := shown(); !strings.Contains(got, "\nstate       maintenance: ") || !strings.Contains(got, "\nwaits       apid Starting for 5s\n") || strings.Contains(got, "\x1b") {
			t.Errorf("%q", got)
		}
		stage(configuration.Configured)
		up.Store(true)
		time.Sleep(showPause / 2)
		if got := shown(); got != "" {
			t.Errorf("a quarter of a minute later: %q", got)
		}
		time.Sleep(showPause)
		if got := shown(); !strings.Contains(got, "\nstate       all services are up") {
			t.Errorf("%q", got)
		}
		time.Sleep(time.Hour)
		if got := shown(); got != "" {
			t.Errorf("nothing has changed: %q", got)
		}
		put(t, configuration.Configs.Put(r.o.Store.As(configuration.ID), configuration.ConfigID, &config.Config{Machine: config.Machine{Console: config.Console{Disabled: []config.ConsoleCommand{"status"}}}}))
		stage(configuration.Maintenance)
		time.Sleep(time.Hour)
		if got := shown(); got != "" {
			t.Errorf("the status is disabled: %q", got)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestPower(t *testing.T) {
	r := newRig(t)
	if got := r.typed(t, "reboot", "shutdown", "", "nothing"); strings.Count(got, "Commands, each ended with Enter:") != 1 || !strings.HasSuffix(got, `"nothing" is no command: Enter lists them.`+"\n") {
		t.Error(got)
	}
	if diff := cmp.Diff([]syscall.Signal{syscall.SIGINT, syscall.SIGTERM}, r.signals); diff != "" {
		t.Error(diff)
	}
	c := &config.Config{}
	c.Machine.Console.Disabled = []config.ConsoleCommand{"reboot"}
	put(t, configuration.Configs.Put(r.o.Store.As(configuration.ID), configuration.ConfigID, c))
	if got := r.typed(t, "reboot"); got != "reboot is disabled by machine.console.disabled.\n" || len(r.signals) != 2 {
		t.Error(got, r.signals)
	}
	if got := r.typed(t, "network lo dhcp"); !strings.Contains(got, "the machine has a configuration") || len(r.network) > 0 {
		t.Error(got)
	}
}

func TestNetwork(t *testing.T) {
	address, all := netip.MustParsePrefix("192.168.1.5/24"), netip.MustParsePrefix("0.0.0.0/0")
	routes := []config.Route{{Network: all, Gateway: netip.MustParseAddr("192.168.1.1")}}
	for line, want := range map[string]config.Network{
		"network":                   {},
		"network lo dhcp":           {Interfaces: []config.Interface{{Name: "lo", DHCP: true}}},
		"network lo 192.168.1.5/24": {Interfaces: []config.Interface{{Name: "lo", CIDR: address}}},
		"network lo.30 dhcp":        {Interfaces: []config.Interface{{Name: "lo", VLANs: []config.VLAN{{ID: 30, DHCP: true}}}}},
		"network lo 192.168.1.5/24 192.168.1.1 9.9.9.9": {
			Interfaces: []config.Interface{{Name: "lo", CIDR: address, Routes: routes}}, Nameservers: []netip.Addr{netip.MustParseAddr("9.9.9.9")},
		},
	} {
		r := newRig(t)
		if got := r.typed(t, line); !strings.HasPrefix(got, "These settings count") {
			t.Errorf("%s: %s", line, got)
		}
		if diff := cmp.Diff([]config.Network{want}, r.network, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s: %s", line, diff)
		}
	}
	for line, want := range map[string]string{
		"network lo":                    "network: the address is missing, such as 192.168.1.5/24, or dhcp",
		"network nosuch dhcp":           "network: interface nosuch: there are ",
		"network lo.5000 dhcp":          "network: VLAN 5000: must be 1 to 4094",
		"network lo 192.168.1.5":        "network: address 192.168.1.5: must be an address with its prefix length",
		"network lo 10.0.0.1/8 gateway": `network: ParseAddr("gateway")`,
	} {
		r := newRig(t)
		if got := r.typed(t, line); !strings.HasPrefix(got, want) || len(r.network) > 0 {
			t.Errorf("%s: %s", line, got)
		}
	}
}

// A recovery key is neither in the answers nor in the log, also if it is typed after the command.
func TestUnlock(t *testing.T) {
	r := newRig(t)
	var log bytes.Buffer
	r.o.Log = slog.New(slog.NewTextHandler(&log, nil))
	key := client.NewRecoveryKey()
	got := r.typed(t, "unlock", strings.ToUpper(key), "unlock "+key, key, "unlock", key[1:], "status")
	if len(r.keys) != 2 || r.keys[0] != key || r.keys[1] != key || strings.Count(got, "Type the recovery key") != 3 ||
		!strings.Contains(got, "unlock: group 1 of the recovery key has 7 characters instead of 8\n") || !strings.Contains(got, "\nstate ") {
		t.Errorf("%q: %s", r.keys, got)
	}
	if part := key[1:8]; strings.Contains(got+log.String(), part) || strings.Count(log.String(), "command=unlock\n") != 3 {
		t.Errorf("%s\n%s", got, log.String())
	}
}

// A locked disk is wiped for who types its name.
func TestWipe(t *testing.T) {
	r := newRig(t)
	var wiped []string
	r.o.Wipe = func(device string) error {
		if wiped = append(wiped, device); device != "/dev/sda" {
			return errors.New("the locked disk is /dev/sda")
		}
		return nil
	}
	got := r.typed(t, "wipe /dev/sda", "", "wipe", " /dev/sda ")
	if !slices.Equal(wiped, []string{"", "/dev/sda"}) || !strings.Contains(got, "wipe: the locked disk is /dev/sda\n") || !strings.Contains(got, "The disk is wiped") {
		t.Errorf("%q: %s", wiped, got)
	}
}

// The terminal shows what is typed again after a key was typed.
func TestUnlockIsNotShown(t *testing.T) {
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	term, err := openTerminal(fmt.Sprintf("/dev/pts/%d", n))
	if err != nil {
		t.Fatal(err)
	}
	defer term.close()
	echoes := func() bool {
		s, err := unix.IoctlGetTermios(int(master.Fd()), unix.TCGETS)
		return err == nil && s.Lflag&unix.ECHO != 0
	}
	show := term.quiet()
	if echoes() {
		t.Error("the key is shown")
	}
	if show(); !echoes() {
		t.Error("nothing is shown any more")
	}
}

// A device that sends back what it gets, such as another machine's console, doesn't restart this one, and isn't
// answered for ever.
func TestEcho(t *testing.T) {
	r := newRig(t)
	put(t, network.Statuses.Put(r.o.Store.As(network.ID), network.ID, network.Status{Problems: []string{"eth0 dhcp"}}))
	r.wrong = problems(strings.Repeat("x ", 34) + "shutdown")
	text := r.typed(t, "", "status", "log", "unknown", "network", "network lo", "unlock", "", "wipe", "", "reboot")
	if !strings.Contains(text, "\n            shutdown\n") {
		t.Error(text)
	}
	r.signals, r.network = nil, nil
	for range 3 {
		text = r.typed(t, strings.Split(text, "\n")...)
	}
	if len(r.signals) > 0 || len(r.network) > 0 || strings.TrimSpace(strings.ReplaceAll(text, help(), "")) != "" {
		t.Errorf("signals %v, network %v, and the last answer\n%s", r.signals, r.network, text)
	}
}

// The configuration has the same commands as the console.
func TestCommandsOfTheConfiguration(t *testing.T) {
	unknown := func(name string) string {
		_, _, err := config.Load("test", []byte("version: v1alpha1\nmachine: {console: {disabled: ["+name+"]}}\n"))
		return fmt.Sprint(err)
	}
	for _, c := range commands {
		if text := unknown(c.name); strings.Contains(text, "console") {
			t.Errorf("%s: %s", c.name, text)
		}
	}
	if text, want := unknown("ssh"), "is not one of status, log, network, unlock, wipe, reboot, shutdown"; !strings.Contains(text, want) || len(commands) != strings.Count(want, ",")+1 {
		t.Error(text)
	}
}
