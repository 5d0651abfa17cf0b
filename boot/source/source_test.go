package source

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/freeport"
)

// files makes a file system of absolute paths.
func files(pairs ...string) fstest.MapFS {
	m := fstest.MapFS{}
	for i := 0; i < len(pairs); i += 2 {
		m[strings.TrimPrefix(pairs[i], "/")] = &fstest.MapFile{Data: []byte(pairs[i+1])}
	}
	return m
}

// smbios is an OEM string structure.
func smbios(ss ...string) string {
	return "\x0b\x05\x00\x01" + string(rune(len(ss))) + strings.Join(ss, "\x00") + "\x00\x00"
}

const smbiosFile = "/sys/firmware/dmi/entries/11-0/raw"

func volume(label string, files fs.FS) boot.Mounter {
	return func(_ context.Context, want string, use func(fs.FS) error) error {
		if want != label {
			return none("no volume labelled " + want)
		}
		return use(files)
	}
}

// orNone is a machine without volumes where there is no mounter.
func orNone(mount boot.Mounter) boot.Mounter {
	if mount == nil {
		return func(context.Context, string, func(fs.FS) error) error { return none("no volumes here") }
	}
	return mount
}

func noWait(context.Context, time.Duration) error { return nil }

func TestFind(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.Write([]byte("web")) }))
	defer server.Close()
	all := files(boot.ConfigFile, "state", boot.SeedConfigFile, "seed", fwCfgFile, "fw_cfg", smbiosFile, smbios("garboard.config=data:;base64,c21iaW9z"))
	without := func(names ...string) fs.FS {
		m := fstest.MapFS{}
		for name, f := range all {
			m[name] = f
		}
		for _, name := range names {
			delete(m, strings.TrimPrefix(name, "/"))
		}
		return m
	}
	iso := volume("metal-iso", files("/config.yaml", "iso"))
	for _, tt := range []struct {
		name    string
		options Options
		source  string
		data    string
		err     string
	}{
		{"state first", Options{Root: all, Cmdline: boot.ParseCmdline("garboard.config=" + server.URL)}, "state", "state", ""},
		{"kernel argument", Options{Root: without(boot.ConfigFile), Cmdline: boot.ParseCmdline("garboard.config=" + server.URL)}, "kernel argument", "web", ""},
		{"volume", Options{Root: without(boot.ConfigFile), Cmdline: boot.ParseCmdline("garboard.config=metal-iso"), Mount: iso}, "kernel argument", "iso", ""},
		{"fw_cfg", Options{Root: without(boot.ConfigFile)}, "fw_cfg", "fw_cfg", ""},
		{"SMBIOS", Options{Root: without(boot.ConfigFile, fwCfgFile)}, "SMBIOS", "smbios", ""},
		{"SMBIOS with a URL", Options{Root: files(smbiosFile, smbios("Vendor", "garboard.config="+server.URL))}, "SMBIOS", "web", ""},
		{"container: state", Options{Mode: boot.Container, Root: all}, "state", "state", ""},
		{"container: seed", Options{Mode: boot.Container, Root: without(boot.ConfigFile)}, "seed", "seed", ""},
		{"container: reset", Options{Mode: boot.Container, Root: files(boot.SeedConfigFile, "seed", boot.ResetFile, "")}, "", "",
			"no configuration: state: no /system/state/config.yaml; seed: it was for the node before it was reset"},
		{"container: nothing else", Options{Mode: boot.Container, Root: without(boot.ConfigFile, boot.SeedConfigFile)}, "", "",
			"no configuration: state: no /system/state/config.yaml; seed: no /run/garboard-seed/config.yaml"},
		{"nothing", Options{Root: files(smbiosFile, smbios("Vendor"))}, "", "", "no configuration: state: no /system/state/config.yaml; " +
			"kernel argument: garboard.config= isn't given; fw_cfg: no " + fwCfgFile + "; SMBIOS: no OEM string garboard.config= in /sys/firmware/dmi/entries"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.options.HTTP, tt.options.Wait = server.Client(), noWait
			got, err := Find(t.Context(), All(tt.options))
			if got.Source != tt.source || string(got.Data) != tt.data {
				t.Errorf("found %q from %q", got.Data, got.Source)
			}
			if tt.err == "" && err != nil || tt.err != "" && (err == nil || err.Error() != tt.err || !errors.Is(err, boot.ErrNone)) {
				t.Errorf("error\n%v, want\n%v", err, tt.err)
			}
		})
	}
}

// A configuration on a medium that has a checksum must have it.
func TestDamagedConfigurationOnAMedium(t *testing.T) {
	const sum = "8f05d8eb7e5f4cf4efdf7ab3ae13b3d1bd5fd1d4ab8ac7a1c4cf0a5f3b2d5d4e"
	for beside, ok := range map[string]bool{fmt.Sprintf("%x  config.yaml\n", sha256.Sum256([]byte("iso"))): true, fmt.Sprintf("%x", sha256.Sum256([]byte("iso"))): true, sum + "  config.yaml\n": false, "": false} {
		got, err := Find(t.Context(), All(Options{
			Root: files(fwCfgFile, "fw_cfg"), Cmdline: boot.ParseCmdline("garboard.config=metal-iso"), Wait: noWait,
			Mount: volume("metal-iso", files("/config.yaml", "iso", "/config.yaml.sha256", beside)),
		}))
		if ok != (err == nil && string(got.Data) == "iso") || !ok && !strings.Contains(err.Error(), "config.yaml isn't as config.yaml.sha256 beside it says") {
			t.Errorf("%q: %q, %v", beside, got.Data, err)
		}
	}
}

// A source that has a configuration and can't be reached isn't skipped.
func TestFindStopsAtFailure(t *testing.T) {
	rest := files(fwCfgFile, "fw_cfg")
	for _, tt := range []struct{ arg, want string }{
		{"metal-iso", "read configuration from kernel argument: volume labelled metal-iso with config.yaml: no volumes here"},
		{"ftp://x", "read configuration from kernel argument: garboard.config=ftp://x is neither an http or https URL nor metal-iso"},
		{"data:x", "read configuration from kernel argument: data: URL holds no base64"},
		{"http://[", "read configuration from kernel argument: not a URL"},
	} {
		_, err := Find(t.Context(), All(Options{Root: rest, Cmdline: boot.ParseCmdline("garboard.config=" + tt.arg), Mount: orNone(nil), Wait: noWait}))
		if err == nil || err.Error() != tt.want || errors.Is(err, boot.ErrNone) {
			t.Errorf("%s: %v", tt.arg, err)
		}
	}
	big := files(boot.ConfigFile, strings.Repeat("x", config.MaxSize+1))
	if _, err := Find(t.Context(), All(Options{Root: big})); err == nil || !strings.Contains(err.Error(), "larger than the 1048576 bytes") {
		t.Error(err)
	}
}

func TestFetch(t *testing.T) {
	for _, tt := range []struct {
		name     string
		statuses []int // one per request; the last one is repeated
		requests int
		err      string
	}{
		{"at once", []int{200}, 1, ""},
		{"comes up", []int{503, 500, 429, 200}, 4, ""},
		{"not there", []int{404}, 1, "get URL: 404 Not Found: asking again won't help"},
		{"never", []int{503}, fetchAttempts, "get URL: 503 Service Unavailable (tried 8 times)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			requests := 0
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.WriteHeader(tt.statuses[min(requests, len(tt.statuses)-1)])
				requests++
				w.Write([]byte("data"))
			}))
			defer server.Close()
			var waited time.Duration
			pass := func(_ context.Context, d time.Duration) error { waited += d; return nil }
			location := strings.Replace(server.URL, "://", "://me:secret@", 1)
			data, err := fetch(t.Context(), server.Client(), pass, request{url: location})
			if requests != tt.requests {
				t.Errorf("%d requests", requests)
			}
			if tt.err == "" {
				if err != nil || string(data) != "data" {
					t.Errorf("%q, %v", data, err)
				}
				return
			}
			want := strings.Replace(tt.err, "URL", strings.Replace(server.URL, "://", "://me:xxxxx@", 1), 1)
			if err == nil || err.Error() != want {
				t.Errorf("%v, want %s", err, want)
			}
			if tt.requests > 1 && waited > 2*time.Minute {
				t.Errorf("waited %s", waited)
			}
		})
	}
}

// A document has the sum that its URL demands, and what is asked for over TLS comes over TLS.
func TestFetchIsWhatWasMeant(t *testing.T) {
	const document = "data"
	sum := fmt.Sprintf("%x", sha256.Sum256([]byte(document)))
	serve := http.NewServeMux()
	plain, secure := httptest.NewServer(serve), httptest.NewTLSServer(serve)
	defer plain.Close()
	defer secure.Close()
	serve.HandleFunc("/document", func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte(document)) })
	for path, to := range map[string]string{"/down": plain.URL + "/document", "/up": secure.URL + "/document", "/there": "/document", "/round": "/round"} {
		serve.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, to, http.StatusFound) })
	}
	for _, tc := range []struct{ what, url, err string }{
		{"no sum", plain.URL + "/document", ""},
		{"its sum", plain.URL + "/document#sha256=" + sum, ""},
		{"its sum in capitals", plain.URL + "/document#sha256=" + strings.ToUpper(sum), ""},
		{"another sum", plain.URL + "/document#sha256=" + strings.Repeat("0", 64), "the document has #sha256=" + sum},
		{"a part of its sum", plain.URL + "/document#sha256=" + sum[:8], "its URL demands #sha256=" + sum[:8]},
		{"a misspelt sum", plain.URL + "/document#sha265=" + sum, "its URL demands #sha265="},
		{"a redirect within TLS", secure.URL + "/there", ""},
		{"a redirect to TLS", plain.URL + "/up", ""},
		{"a redirect without TLS on both sides", plain.URL + "/down", ""},
		{"a redirect out of TLS", secure.URL + "/down", "which isn't encrypted"},
		{"a redirect out of TLS, with its sum", secure.URL + "/down#sha256=" + sum, "which isn't encrypted"},
		{"for ever", secure.URL + "/round", "is the redirect 10"},
	} {
		data, err := fetch(t.Context(), secure.Client(), noWait, request{url: tc.url})
		if tc.err == "" && (err != nil || string(data) != document) || tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)) {
			t.Errorf("%s: %q, %v, want %q", tc.what, data, err, tc.err)
		}
	}
}

func TestFetchEnds(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.Write(make([]byte, config.MaxSize+1)) }))
	defer server.Close()
	if _, err := fetch(t.Context(), server.Client(), noWait, request{url: server.URL}); !errors.Is(err, errTooLarge) {
		t.Errorf("too large: %v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	reason := errors.New("power off")
	stop := func(context.Context, time.Duration) error { cancel(reason); return context.Cause(ctx) }
	if _, err := fetch(ctx, http.DefaultClient, stop, request{url: "http://" + freeport.Find(t).String()}); !errors.Is(err, reason) || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("cancelled: %v", err)
	}
}

func TestSMBIOSGarbage(t *testing.T) {
	for _, raw := range []string{"", "\x0b", "\x0b\xff", "\x0b\x05\x00\x01\x00", "\x0b\x05\x00\x01\x01abc"} {
		smbiosStrings([]byte(raw)) // doesn't panic
	}
}
