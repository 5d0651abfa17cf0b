package api

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
)

// ndjson is LogService.Read for programs that use plain HTTP: one JSON object
// per line, {"line": …} or, where lines were lost, {"lost": n}.
func (s *Server) ndjson(logs *logService) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		req, err := logRequest(r)
		if err != nil {
			s.refuse(w, r, err)
			return
		}
		begun := false
		out := json.NewEncoder(w)
		out.SetEscapeHTML(false)
		err = logs.read(r.Context(), req, func(lines []string, lost uint64) error {
			if !begun {
				begun = true
				w.Header().Set("Content-Type", "application/x-ndjson")
				w.WriteHeader(http.StatusOK)
			}
			if lost > 0 {
				if err := out.Encode(map[string]uint64{"lost": lost}); err != nil {
					return err
				}
			}
			for _, line := range lines {
				if err := out.Encode(map[string]string{"line": line}); err != nil {
					return err
				}
			}
			return http.NewResponseController(w).Flush()
		})
		switch {
		case err == nil:
		case !begun:
			s.refuse(w, r, err)
		default:
			panic(http.ErrAbortHandler) // the caller must not take this for the end
		}
	}
}

// logRequest reads the URL: /v1/logs/ID?tail=N&follow=true&previous=true&boot=N.
func logRequest(r *http.Request) (*apiv1.ReadLogRequest, error) {
	req := &apiv1.ReadLogRequest{Id: r.PathValue("id")}
	req.Kubernetes = strings.Contains(req.GetId(), "/")
	query := r.URL.Query()
	for name, set := range map[string]func(int64){"tail": func(n int64) { req.Tail = int32(n) }, "boot": func(n int64) { req.Boot = n }} {
		text := query.Get(name)
		if text == "" {
			continue
		}
		n, err := strconv.ParseInt(text, 10, 32)
		if err != nil {
			return nil, failed(connect.CodeInvalidArgument, "%s=%q isn't a number", name, shortened(readable(text)))
		}
		set(n)
	}
	for name, set := range map[string]*bool{"follow": &req.Follow, "previous": &req.Previous} {
		if !query.Has(name) {
			continue
		}
		text := query.Get(name)
		yes, err := strconv.ParseBool(text)
		if err != nil && text != "" {
			return nil, failed(connect.CodeInvalidArgument, "%s=%q is neither true nor false", name, shortened(readable(text)))
		}
		*set = yes || text == ""
	}
	return req, nil
}
