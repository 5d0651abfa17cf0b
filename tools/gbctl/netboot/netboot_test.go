package netboot

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/iana"
	"github.com/vishvananda/netlink"

	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/isolate"
)

func TestMain(m *testing.M) { isolate.Main(m, syscall.CLONE_NEWNET) }

// budget is for a few packets.
const budget = 10 * time.Second

// output is a writer that tests can read meanwhile.
type output struct {
	mu   sync.Mutex // guards text
	text bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

func (o *output) says(t *testing.T, parts ...string) {
	t.Helper()
	eventually.That(t, budget, "the report", func() error {
		for _, part := range parts {
			if !strings.Contains(o.String(), part) {
				return fmt.Errorf("%q isn't in\n%s", part, o)
			}
		}
		return nil
	})
}

// loopback is an interface that needs no root. In the test's own namespace it is down at first.
func loopback(t *testing.T) Interface {
	t.Helper()
	if os.Geteuid() == 0 {
		lo, err := netlink.LinkByName("lo")
		if err == nil {
			err = netlink.LinkSetUp(lo)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return Interface{"lo", netip.MustParseAddr("127.0.0.1")}
}

func testFiles() map[string][]byte {
	return map[string][]byte{
		media.UKIFile:    bytes.Repeat([]byte("unified kernel image "), 26_000),
		media.ScriptFile: []byte("#!ipxe\n"),
		media.IPXEFile:   bytes.Repeat([]byte{'x'}, 3*maxBlock), // the last block is empty
		"nothing":        {},
	}
}

// serve runs a server until the test ends.
func serve(t *testing.T, o Options, p ports) (*Server, *output) {
	t.Helper()
	out := new(output)
	o.Out = out
	s, err := open(t.Context(), o, p)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, testFiles()) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("the server ended with %v", err)
		}
		if t.Failed() {
			t.Logf("the report:\n%s", out)
		}
	})
	return s, out
}

func get(t *testing.T, url string) (int, string, http.Header) {
	t.Helper()
	response, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(body), response.Header
}

// A UEFI takes the URL out of the packet that it gets, asks for the size, and loads the unified kernel image.
func TestUEFIHTTPBoot(t *testing.T) {
	s, out := serve(t, Options{On: loopback(t)}, ports{})
	offered, err := s.answer(question(t, httpClass, iana.EFI_X86_64_HTTP), false)
	if err != nil || offered == nil {
		t.Fatalf("%v, %v", offered, err)
	}
	packet, err := dhcpv4.FromBytes(offered.ToBytes())
	if err != nil {
		t.Fatal(err)
	}
	url, want := packet.BootFileNameOption(), string(testFiles()[media.UKIFile])
	size, err := http.Head(url)
	if err != nil {
		t.Fatal(err)
	}
	size.Body.Close()
	if size.StatusCode != http.StatusOK || size.ContentLength != int64(len(want)) {
		t.Errorf("%s: %s, %d bytes", url, size.Status, size.ContentLength)
	}
	if code, body, header := get(t, url); code != http.StatusOK || body != want || header.Get("Content-Type") != "application/efi" {
		t.Errorf("%s: %d, %d bytes, %v", url, code, len(body), header)
	}
	out.says(t, clientMAC+" (UEFI HTTP boot, UUID "+wantUUID+") asks for a boot file: garboard.efi", "has loaded garboard.efi in ")
}

func TestHTTP(t *testing.T) {
	s, out := serve(t, Options{On: loopback(t)}, ports{})
	code, body, header := get(t, s.url(media.UKIFile))
	if code != http.StatusOK || body != string(testFiles()[media.UKIFile]) || header.Get("Content-Type") != "application/efi" {
		t.Errorf("%d, %d bytes, %v", code, len(body), header)
	}
	out.says(t, "127.0.0.1 loads garboard.efi by HTTP (0.5 MB)", "has loaded garboard.efi in ")
	for _, path := range []string{"", "config", "../netboot_test.go", "..%2fnetboot_test.go", "%2fetc%2fpasswd", "absent"} {
		if code, body, _ := get(t, s.url(path)); code != http.StatusNotFound {
			t.Errorf("%q: %d %s", path, code, body)
		}
	}
	response, err := http.Post(s.url(media.UKIFile), "text/plain", strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("POST: %s", response.Status)
	}
	before := out.String()
	if response, err = http.Head(s.url(media.UKIFile)); err != nil || response.ContentLength != int64(len(testFiles()[media.UKIFile])) {
		t.Errorf("HEAD: %v, %v", response, err)
	}
	response.Body.Close()
	if out.String() != before {
		t.Errorf("a question for the size is reported:\n%s", out)
	}
}

func TestConfigs(t *testing.T) {
	dir := t.TempDir()
	const uuid = "4c4c4544-0051-3810-8052-b4c04f4a4d31"
	for name, text := range map[string]string{
		"52-54-00-00-00-01.yaml": "by MAC", "CZ 1234.yaml": "by serial", uuid + ".yaml": "by UUID",
		"52-54-00-00-00-09.yaml": "twice", "52:54:00:00:00:09.yaml": "twice", ".hidden.yaml": "hidden", "notes.txt": "notes",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(filepath.Dir(dir), "secret.yaml"), []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	s, out := serve(t, Options{On: loopback(t), Configs: &Configs{Dir: dir}}, ports{})
	if a := s.ConfigArgument(); a != "garboard.config="+s.url("config?uuid=${uuid}&mac=${mac}&serial=${serial}") {
		t.Errorf("argument %s", a)
	}
	// It booted from another network card than the first one.
	s.machines.learn(&dhcpv4.DHCPv4{ClientHWAddr: mac(t, "52:54:00:00:00:01"), Options: dhcpv4.OptionsFromList(
		dhcpv4.OptGeneric(dhcpv4.OptionClientMachineIdentifier, append([]byte{0}, 0x78, 0x56, 0x34, 0x12, 0xab, 0x90, 0x34, 0x12, 1, 2, 3, 4, 5, 6, 7, 8)))})
	check := func(query string, code int, text string) {
		t.Helper()
		if got, body, _ := get(t, s.url("config?"+query)); got != code || code == http.StatusOK && body != text {
			t.Errorf("%s: %d %q, want %d %q", query, got, body, code, text)
		}
	}
	check("mac=52:54:00:00:00:01", 200, "by MAC")
	check("mac=52%3A54%3A00%3A00%3A00%3A01&serial=CZ%201234&uuid="+uuid, 200, "by MAC")
	check("mac=52-54-00-00-00-02&serial=cz+1234&uuid="+uuid, 200, "by serial")
	check("serial=&uuid="+strings.ToUpper(uuid), 200, "by UUID")
	check("mac=52:54:00:00:00:02&uuid=12345678-90ab-1234-0102-030405060708", 200, "by MAC")
	// Another machine has the same UUID, and no configuration here.
	s.machines.learn(&dhcpv4.DHCPv4{ClientHWAddr: mac(t, "52:54:00:00:00:02"), Options: dhcpv4.OptionsFromList(
		dhcpv4.OptGeneric(dhcpv4.OptionClientMachineIdentifier, append([]byte{0}, 0x78, 0x56, 0x34, 0x12, 0xab, 0x90, 0x34, 0x12, 1, 2, 3, 4, 5, 6, 7, 8)))})
	check("mac=52:54:00:00:00:02&uuid=12345678-90ab-1234-0102-030405060708", 404, "")
	check("mac=52:54:00:00:00:09", 500, "")
	check("serial=CZ%201234%20%20", 200, "by serial")
	for _, name := range []string{"", "../secret", "..%2fsecret", "%2e%2e/secret", "notes", "notes.txt", ".hidden", "hidden", ".", "*", "default"} {
		check("serial="+name+"&mac="+name+"&uuid="+name, 404, "")
	}
	out.says(t, "52-54-00-00-00-09.yaml and ", "are for the same machine: remove all but one",
		"has no configuration here (MAC \"../secret\"", "gets its configuration: "+filepath.Join(dir, "CZ 1234.yaml"))
	if err := os.WriteFile(filepath.Join(dir, "default.yaml"), []byte("for others"), 0o600); err != nil {
		t.Fatal(err)
	}
	check("mac=52:54:00:00:00:03", 200, "for others")
	check("serial=../secret", 200, "for others")

	path := filepath.Join(dir, "default.yaml")
	if w, err := Warning(path); w != "" || err != nil {
		t.Errorf("a private file: %q, %v", w, err)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if w, err := Warning(path); !strings.Contains(w, "(mode 0644): chmod 600 "+path) || err != nil {
		t.Errorf("a file for all: %q, %v", w, err)
	}
	one := &Configs{File: path}
	if _, text, err := one.find("any"); string(text) != "for others" || err != nil || one.bySerial() {
		t.Errorf("one file: %s, %v", text, err)
	}
}

func TestPortInUse(t *testing.T) {
	on := loopback(t)
	other, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	port := other.Addr().(*net.TCPAddr).Port
	_, err = open(t.Context(), Options{On: on, Out: io.Discard}, ports{http: port})
	if err == nil || !strings.Contains(err.Error(), "TCP port "+strconv.Itoa(port)+" (HTTP) is in use by another program") || !strings.Contains(err.Error(), "--http-port") {
		t.Errorf("error: %v", err)
	}
	if err := explain(os.NewSyscallError("bind", syscall.EACCES), 67, "UDP", "proxy DHCP", ""); !strings.Contains(err.Error(), "UDP port 67 (proxy DHCP) needs root or CAP_NET_BIND_SERVICE") {
		t.Errorf("error: %v", err)
	}
}

func mac(t *testing.T, text string) net.HardwareAddr {
	t.Helper()
	a, err := net.ParseMAC(text)
	if err != nil {
		t.Fatal(err)
	}
	return a
}
