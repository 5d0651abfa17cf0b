package netboot

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"time"
)

// configPath is where a machine gets its configuration.
const configPath = "config"

// ConfigArgument is the kernel argument with which a machine finds its configuration here. The machine fills in the
// variables, or iPXE does.
func (s *Server) ConfigArgument() string {
	variables := "?uuid=${uuid}&mac=${mac}"
	if s.o.Configs.bySerial() {
		variables += "&serial=${serial}"
	}
	return "garboard.config=" + s.url(configPath) + variables
}

const (
	// httpEnd is how long connections may take to notice the end: a transfer ends with its next block.
	httpEnd = 2 * time.Second
	// headerWait is for the few lines of a request.
	headerWait = 30 * time.Second
)

func (s *Server) serveHTTP(ctx context.Context) error {
	server := http.Server{Handler: s.handler(ctx), ReadHeaderTimeout: headerWait}
	over, cancel := context.WithCancel(ctx)
	var end sync.WaitGroup
	defer end.Wait()
	defer cancel()
	end.Go(func() {
		<-over.Done()
		limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), httpEnd)
		defer cancel()
		if server.Shutdown(limit) != nil {
			server.Close()
		}
	})
	return server.Serve(s.http)
}

// handler gives files and configurations. It has no lists of them.
func (s *Server) handler(ctx context.Context) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{name}", func(w http.ResponseWriter, r *http.Request) {
		name, who := r.PathValue("name"), s.machines.name(r.RemoteAddr)
		file, known := s.files[name]
		if !known {
			s.report.line(who, "HTTP: no file %q", name)
			http.NotFound(w, r)
			return
		}
		kind := "application/octet-stream"
		if strings.HasSuffix(name, ".efi") {
			kind = "application/efi" // UEFI 2.10, 24.7.6
		}
		w.Header().Set("Content-Type", kind)
		p := s.report.progress(who, name, "HTTP", len(file))
		http.ServeContent(w, r, name, time.Time{}, &reader{bytes.NewReader(file), ctx, p})
		p.end(ended(ctx, errors.New("the machine has closed the connection")))
	})
	if s.o.Configs != nil {
		mux.HandleFunc("GET /"+configPath, s.serveConfig)
	}
	return mux
}

// ended is why a transfer has ended: because of an error, or because of ctx.
func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return errors.New("gbctl ends")
	}
	return err
}

// reader is a file whose reading is reported, and ends with ctx.
type reader struct {
	file *bytes.Reader
	ctx  context.Context
	p    *progress
}

func (r *reader) Seek(offset int64, whence int) (int64, error) { return r.file.Seek(offset, whence) }

func (r *reader) Read(b []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := r.file.Read(b)
	if n > 0 {
		r.p.reached(r.file.Size() - int64(r.file.Len()))
	}
	return n, err
}

// serveConfig gives a machine its configuration, by what it says about itself.
func (s *Server) serveConfig(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	who := s.machines.name(r.RemoteAddr)
	// iPXE sends the blanks at the end, too
	uuid, serial := strings.ToLower(strings.TrimSpace(q.Get("uuid"))), strings.TrimSpace(q.Get("serial"))
	// A machine names its first network card, which needn't be the one that it booted from.
	name, text, err := s.o.Configs.find(q.Get("mac"), s.machines.bootedFrom(uuid), serial, uuid)
	switch {
	case err != nil:
		s.report.line(who, "gets no configuration: %v", err)
		http.Error(w, "the configuration can't be read", http.StatusInternalServerError)
	case text == nil:
		s.report.line(who, "has no configuration here (MAC %q, serial number %q, UUID %q): it waits in maintenance mode, and asks again", q.Get("mac"), serial, uuid)
		http.NotFound(w, r)
	default:
		s.report.line(who, "gets its configuration: %s", name)
		w.Header().Set("Content-Type", "application/yaml")
		w.Header().Set("Cache-Control", "no-store")
		_, _ = w.Write(text) // the machine asks again
	}
}
