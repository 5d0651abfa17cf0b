package kubeclient

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
)

// StatusError is an answer of the API server, or of a kubelet, that isn't a
// success.
type StatusError struct {
	Code    int      // HTTP status
	Reason  string   // Kubernetes' one-word reason: "NotFound"; "" if the server gave none
	Message string   // the server's sentence
	Causes  []string // what else it says, such as which disruption budget keeps a pod
}

func (e *StatusError) Error() string { return e.Message }

// maxErrorText bounds how much of a body that isn't a Status ends up in an error.
const maxErrorText = 2048

// maxCauses bounds what is kept of an answer's causes: an eviction has one, an object
// that is invalid one for each field.
const maxCauses = 16

// statusError reads an error answer: a Status object where the server speaks the
// API, text where it is a kubelet, a proxy, or an API server that still starts.
func statusError(code int, body []byte) *StatusError {
	var status struct {
		Kind    string `json:"kind"`
		Reason  string `json:"reason"`
		Message string `json:"message"`
		Details struct {
			Causes []struct {
				Message string `json:"message"`
			} `json:"causes"`
		} `json:"details"`
	}
	if json.Unmarshal(body, &status) == nil && status.Kind == "Status" && status.Message != "" {
		e := &StatusError{Code: code, Reason: status.Reason, Message: status.Message}
		for _, cause := range status.Details.Causes[:min(len(status.Details.Causes), maxCauses)] {
			e.Causes = append(e.Causes, cause.Message[:min(len(cause.Message), maxErrorText)])
		}
		return e
	}
	text := strings.TrimSpace(string(body[:min(len(body), maxErrorText)]))
	switch {
	case code >= http.StatusInternalServerError:
		return &StatusError{Code: code, Message: fmt.Sprintf("an error on the server (%q) has prevented the request from succeeding", text)}
	case code == http.StatusUnauthorized:
		return &StatusError{Code: code, Reason: "Unauthorized", Message: "the server has asked for the client to provide credentials"}
	default:
		return &StatusError{Code: code, Message: fmt.Sprintf("the server answered %d %s (%q)", code, http.StatusText(code), text)}
	}
}

func hasCode(err error, code int) bool {
	status, ok := errors.AsType[*StatusError](err)
	return ok && status.Code == code
}

// IsNotFound: the object, or its resource, isn't there.
func IsNotFound(err error) bool { return hasCode(err, http.StatusNotFound) }

// IgnoreNotFound is for an object that needn't exist.
func IgnoreNotFound(err error) error {
	if IsNotFound(err) {
		return nil
	}
	return err
}

// IsConflict: somebody else changed the object meanwhile, owns the field, or an
// object of that name exists; see IsAlreadyExists for the last.
func IsConflict(err error) bool { return hasCode(err, http.StatusConflict) }

// IsAlreadyExists: a create came too late.
func IsAlreadyExists(err error) bool {
	status, ok := errors.AsType[*StatusError](err)
	return ok && status.Code == http.StatusConflict && status.Reason == "AlreadyExists"
}

// IsForbidden: the user isn't allowed to.
func IsForbidden(err error) bool { return hasCode(err, http.StatusForbidden) }

// IsRefused: the user isn't one of the server's, or isn't allowed to.
func IsRefused(err error) bool { return IsForbidden(err) || hasCode(err, http.StatusUnauthorized) }

// IsGone: the resource version to watch from is too old; list anew.
func IsGone(err error) bool { return hasCode(err, http.StatusGone) }
