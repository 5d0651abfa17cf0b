//go:build kernel

package disks

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	keyserver "github.com/garboard-os/garboard/tools/kms/server"
)

// A keyServer is one that can be down.
type keyServer struct {
	t     *testing.T
	dir   string
	url   config.URL
	http  *http.Server
	calls int // how often a machine without a configuration had its network started
	with  []config.Network
}

func newKeyServer(t *testing.T) *keyServer {
	t.Helper()
	k := &keyServer{t: t, dir: t.TempDir()}
	k.lists("9c3a7e21-5d48-4b0f-8f62-17e4d9c05ab3")
	k.url.Scheme, k.url.Host = "https", "127.0.0.1:0"
	k.up()
	t.Cleanup(func() { k.down() })
	return k
}

func (k *keyServer) lists(machines string) {
	k.t.Helper()
	if err := os.WriteFile(filepath.Join(k.dir, "machines"), []byte(machines+"\n"), 0o600); err != nil {
		k.t.Fatal(err)
	}
}

func (k *keyServer) up() {
	k.t.Helper()
	secret, err := keyserver.Key(k.dir)
	if err != nil {
		k.t.Fatal(err)
	}
	cert, err := keyserver.Certificate(k.dir, "127.0.0.1", time.Now())
	if err != nil {
		k.t.Fatal(err)
	}
	l, err := net.Listen("tcp", k.url.Host)
	if err != nil {
		k.t.Fatal(err)
	}
	k.url.Host = l.Addr().String()
	k.http = (&keyserver.Server{Key: secret, List: filepath.Join(k.dir, "machines"), Log: slog.New(slog.NewTextHandler(k.t.Output(), nil))}).HTTP(cert)
	go k.http.ServeTLS(l, "", "")
}

func (k *keyServer) down() { k.http.Close() }

func (k *keyServer) key(slot int) config.EncryptionKey {
	k.t.Helper()
	ca, err := os.ReadFile(filepath.Join(k.dir, "ca.crt"))
	if err != nil {
		k.t.Fatal(err)
	}
	return config.EncryptionKey{Slot: new(slot), KMS: &config.EncryptionKMS{Endpoint: k.url, CA: ca}}
}

// boots is a machine that counts how its network is started.
func (k *keyServer) boots(disk *loop) *machineUnderTest {
	k.t.Helper()
	m := bootMachine(k.t, disk)
	m.disks.o.serverPatience = time.Second
	m.disks.o.Network = func(_ context.Context, settings *config.Network) error {
		k.calls++
		if settings != nil {
			k.with = append(k.with, *settings)
		}
		return nil
	}
	return m
}

// The system's volumes open with what a server unseals for this machine, before there is a configuration. While the
// server is down, nothing opens, and nothing is made anew; then the key goes, and another one comes.
func TestKeysOfAServer(t *testing.T) {
	disk, k := newLoop(t, boot.MinDisk), newKeyServer(t)
	install := config.Install{Disk: disk.Path}
	keys := config.SystemDiskEncryption{State: sealed(k.key(2)), Ephemeral: sealed(k.key(0))}

	m := k.boots(disk)
	shown := m.comesUp(install, keys)
	if state, ephemeral := shown[boot.LabelState], shown[boot.LabelEphemeral]; state.Layers != "LUKS2 (2 kms), xfs" || ephemeral.Layers != "LUKS2 (0 kms), xfs" || state.Problem != "" {
		t.Errorf("%+v", shown)
	}
	if k.calls > 0 {
		t.Error("the network was started although the configuration is known")
	}
	m.write("state/mark", hidden)
	m.write("var/mark", hidden)
	m.off()
	if disk.Holds(hidden) {
		t.Error("the disk has what is encrypted")
	}

	k.down()
	m = k.boots(disk)
	for range 2 {
		if found, err := m.mountState(); found || err == nil || !strings.Contains(err.Error(), "the kms key of slot 2: no answer of "+k.url.String()) {
			t.Errorf("the server is down: %v, %v", found, err)
		}
	}
	k.up()
	if found, err := m.mountState(); !found || err != nil {
		t.Fatalf("the server is back: %v", err)
	}
	if k.calls != 3 || len(k.with) != 1 {
		t.Errorf("the network was started %d times, with %+v", k.calls, k.with)
	}
	m.comesUp(install, config.SystemDiskEncryption{State: sealed(k.key(2), staticKey()), Ephemeral: sealed(k.key(0), staticKey())})
	m.isMarked()
	m.off()

	// Another key opens at once, without the network; META has the former network, too.
	k.down()
	k.calls, k.with = 0, nil
	m = k.boots(disk)
	if found, err := m.mountState(); !found || err != nil || k.calls > 0 {
		t.Fatalf("with another key: %v, %d calls", err, k.calls)
	}
	m.servers = []netip.Addr{netip.MustParseAddr("10.5.0.9")}
	shown = m.comesUp(install, config.SystemDiskEncryption{State: sealed(k.key(2), staticKey()), Ephemeral: sealed(staticKey())})
	if !strings.Contains(shown[boot.LabelState].Problem, "no answer of") || shown[boot.LabelEphemeral].Layers != "LUKS2 (3 static), xfs" {
		t.Errorf("%+v", shown)
	}
	m.isMarked()
	m.off()
	k.up()
	m = k.boots(disk)
	shown = m.comesUp(install, config.SystemDiskEncryption{State: sealed(k.key(2)), Ephemeral: sealed(staticKey())})
	if shown[boot.LabelState].Problem != "" {
		t.Errorf("%+v", shown)
	}
	m.off()

	// A machine that was stolen.
	k.lists("# stolen: 9c3a7e21-5d48-4b0f-8f62-17e4d9c05ab3")
	k.with = nil
	m = k.boots(disk)
	for range 2 {
		if found, err := m.mountState(); found || err == nil || !strings.Contains(err.Error(), "isn't in its list") {
			t.Errorf("it was revoked: %v, %v", found, err)
		}
	}
	if len(k.with) != 2 || len(k.with[0].Nameservers) == len(k.with[1].Nameservers) {
		t.Errorf("not both networks were tried: %+v", k.with)
	}
}
